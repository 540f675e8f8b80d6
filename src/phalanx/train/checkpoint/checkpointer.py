"""`Checkpointer`, the public class: saves and loads the state of all ranks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from phalanx.comm.communicator import Communicator
from phalanx.comm.ending import say_last
from phalanx.train.checkpoint.agree import from_rank_0, same_everywhere, together
from phalanx.train.checkpoint.background import Background
from phalanx.train.checkpoint.differences import some
from phalanx.train.checkpoint.entries import capture, named
from phalanx.train.checkpoint.errors import CheckpointError, explain
from phalanx.train.checkpoint.history import History
from phalanx.train.checkpoint.host_copies import HostCopies
from phalanx.train.checkpoint.load import Load
from phalanx.train.checkpoint.lock import DirectoryLock
from phalanx.train.checkpoint.places import CheckpointPlace, check_shared, clean, find_places
from phalanx.train.checkpoint.replicas import compare, find_owners, own_tensors, tabulate
from phalanx.train.checkpoint.tree import Tensors, encode
from phalanx.train.checkpoint.write import WriteJob, write

KEEP_ALIVE = 1.0  # seconds between keep-alive messages while a disk is slow
EXIT_WAIT = 1.0  # seconds to wait for a pending write if an exception leaves the `with`: the other ranks are waiting


class Checkpointer:
    """Saves and loads the state of all ranks in a directory, and keeps the newest checkpoints.

    All ranks call `save` and `load` together, with the same steps and names. All ranks must share the directory.

    Args:
        directory: Where the checkpoints go. It is created if it does not exist.
        comm: The communicator of the ranks that save together.
        keep: How many of the newest checkpoints to keep.
        config: Plain data that describes what is trained. `load` rejects a checkpoint with another config.
        failed: Called with the error of a write that failed, at once and in the thread that writes. The next `save` then tries
            again instead of raising that error.

    Raises:
        CheckpointError: If the directory cannot be written, or some ranks do not see what rank 0 writes there.

    Example:
        >>> import tempfile, torch, phalanx
        >>> comm = phalanx.create_communicator()
        >>> model = torch.nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as directory, phalanx.Checkpointer(directory, comm) as checkpoints:
        ...     checkpoints.save(120, model=model)
        ...     step = checkpoints.load(model=model)
        >>> step
        120
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        comm: Communicator,
        keep: int = 3,
        *,
        config: Any = None,
        failed: Callable[[BaseException], None] | None = None,
    ) -> None:
        if not isinstance(comm, Communicator):
            raise TypeError(f"comm is what phalanx.create_communicator() returns, got {type(comm).__name__}")
        if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
            raise ValueError(f"keep={keep!r}: how many checkpoints to keep, at least 1")
        self._config, tensors = encode(config, "config")
        if tensors:
            raise TypeError(f"config is plain data, but {next(iter(tensors))} is a tensor")
        self._directory, self._comm, self._keep = Path(directory).absolute(), comm, keep
        self._background, self._copies = Background(failed), HostCopies()
        self._history = History()
        self._writers: tuple[int, ...] = ()  # members of an elastic job that write the last save
        self._lock: DirectoryLock | None = None  # on rank 0, from the first save on
        self._closed = False
        comm.as_one(lambda: check_shared(self._directory, comm))

    # ---- save ----------------------------------------------------------------------------------------------------------------

    def save(self, step: int, **state: Any) -> None:
        """Save the state of `step`.

        Returns when the state is copied; the rest happens in the background. If the previous save is still pending, this waits
        for it. If it failed, its error is raised here on all ranks and nothing is saved: call `save` again when the cause is
        gone.

        Args:
            step: Number of the step; it must not decrease.
            **state: Modules, optimizers, tensors, dicts, lists and objects with `state_dict()` and `load_state_dict()`, by name.

        Raises:
            CheckpointError: If the checkpoint cannot be written, the previous save failed, or ranks save different things.
            DirectoryInUseError: If another job writes in this directory.
        """
        self._check_open()
        job, own = self._comm.as_one(lambda: self._agree(step, state))
        copies = self._copies.take(own)
        self._history.saves(job.place)
        lock = DirectoryLock(self._directory) if self._lock else None  # a write may outlive this Checkpointer
        members, has_left = self._comm.membership.ranks, self._comm.has_left
        self._writers = tuple(members[rank] for rank in job.writers)

        def work() -> None:
            with lock or nullcontext():
                write(job, copies, lambda rank: has_left(members[rank]))

        self._background.start(work)

    def _agree(self, step: int, state: Mapping[str, Any]) -> tuple[WriteJob, Tensors]:
        """Determine what this rank writes. All ranks agree on the names, and rank 0 creates a directory."""
        before = self._finish_together()
        if self._background.failed is not None:
            before = None  # already passed to `failed`
        entries = together(
            self._comm, lambda: {name: capture(name, obj) for name, obj in self._check(step, state).items()}, before
        )
        same_everywhere(self._comm, step, list(entries))
        staging, place = from_rank_0(self._comm, lambda: self._prepare(step))
        owners = find_owners(compare(tabulate(entries), self._comm)) if self._comm.size > 1 else {}
        own = own_tensors(self._comm.rank, entries, owners)
        job = WriteJob(
            directory=self._directory,
            staging=staging,
            place=CheckpointPlace(*place),
            rank=self._comm.rank,
            world=self._comm.size,
            config=self._config,
            entries={name: replace(entry, tensors={}) for name, entry in entries.items()},
            owners=owners,
            keep=self._keep,
            rejected=self._history.rejected,
        )
        return job, own

    def wait(self) -> None:
        """Wait until this rank's part of the last save is on disk or, on rank 0, until all parts are.

        Raises:
            CheckpointError: If that save failed.
        """
        if error := self._background.finish():
            raise error

    def _check(self, step: int, state: Mapping[str, Any]) -> Mapping[str, Any]:
        self._history.check_step(step)
        return named(state)

    def _prepare(self, step: int) -> tuple[str, tuple[int, int]]:
        """On rank 0: make the directory of a new checkpoint."""
        try:
            new = self._lock is None or not self._lock.stands()
            if new:  # not earlier: loading while another job runs needs no lock and deletes nothing
                self._lock = DirectoryLock(self._directory)
            places = find_places(self._directory)
            self._history.check(places, self._directory)
            self._history.known = frozenset(places)
            if new or self._comm.elastic:  # a rank may have died while all agreed on a save, which leaves its directory
                clean(self._directory)
            attempts = [place.attempt for place in places if place.step == step]
            place = CheckpointPlace(step, max(attempts, default=0) + 1)
            staging = place.temporary()
            (self._directory / staging).mkdir()
        except FileNotFoundError:
            raise CheckpointError(f"{self._directory} has disappeared: deleted, or no longer mounted?") from None
        except OSError as error:
            raise CheckpointError(f"cannot write in {self._directory}: {explain(error)}") from None
        return staging, (place.step, place.attempt)

    # ---- load ----------------------------------------------------------------------------------------------------------------

    def load(self, **state: Any) -> int | None:
        """Fill `state` from the newest intact checkpoint.

        Nothing changes unless everything fits on all ranks. If a checkpoint is damaged, it warns and tries the one before.

        Args:
            **state: The objects to fill in place, by the names they were saved under.

        Returns:
            The step of the checkpoint, or None if there is none yet.

        Raises:
            CheckpointError: If the checkpoint belongs to another model or config (the message lists the differences), or if every
                checkpoint is damaged.
        """
        self._check_open()
        return self._comm.as_one(lambda: self._load(state))

    def _load(self, state: Mapping[str, Any]) -> int | None:
        together(self._comm, lambda: named(state), self._finish_together())
        places = [CheckpointPlace(*place) for place in from_rank_0(self._comm, self._find)]
        damages: list[str] = []
        known = frozenset(places)
        for place in places:
            damage = Load(self._directory, place, self._config, self._comm).restore(state)
            if not damage:
                self._history.loads(place, known)
                return place.step
            damages.append(damage)
            self._history.rejected |= {place}
            if self._comm.rank == 0:
                warnings.warn(f"damaged checkpoint, falling back to an older one: {damage}", RuntimeWarning, stacklevel=2)
        if damages:
            raise CheckpointError(f"every checkpoint in {self._directory} is damaged:{some(damages)}")
        self._history.loads(None, known)
        return None

    def _find(self) -> list[tuple[int, int]]:
        try:
            return [(place.step, place.attempt) for place in find_places(self._directory)]
        except OSError as error:
            raise CheckpointError(f"cannot read {self._directory}: {explain(error)}") from None

    # ---- ranks that die and join ---------------------------------------------------------------------------------------------

    def lost(self, *, wait: bool = False) -> bool:
        """Whether the last save will never be complete, because a rank of an elastic job died: then save again.

        All ranks call it. With `wait`, it waits for the pending write first.

        Raises:
            CheckpointError: With `wait`, if that save failed for another reason.
        """
        return self._comm.as_one(lambda: self._look_for_it(wait=wait))

    def _look_for_it(self, *, wait: bool) -> bool:
        error = self._finish_together() if wait else None

        def look() -> bool:
            somebody_left = any(map(self._comm.has_left, self._writers))
            if isinstance(error, CheckpointError) and not somebody_left:
                raise error
            if somebody_left:
                self._background.finish()  # ends soon: the writer notices that, too
            return self._history.last not in (None, *find_places(self._directory)) and not self._background.busy

        return from_rank_0(self._comm, look)

    def state_dict(self) -> dict[str, Any]:
        """What was saved and loaded so far, for a rank that joins an elastic job: `opt.share(checkpoints=checkpoints)`."""
        return self._history.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the other ranks' state."""
        self._history = History.of(state)

    # ---- end -----------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for the pending write. Idempotent; not all ranks need to call it.

        Raises:
            CheckpointError: If that write failed.
        """
        if not self._closed:
            self._closed = True
            try:
                self.wait()
            finally:
                self._unlock()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._closed = True
            if failure := self._background.finish(EXIT_WAIT):
                say_last(f"the last checkpoint is not complete: {failure}")
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()

    # ---- ranks that agree ------------------------------------------------------------------------------------------------------

    def _finish_together(self) -> BaseException | None:
        """Wait until no rank is writing, and return the error of this rank's write. A slow disk does not time out."""
        error = None
        while True:
            error = self._background.finish(KEEP_ALIVE) or error
            if not any(self._comm.allgather_obj(self._background.busy)):
                return error

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this Checkpointer is closed")
