"""Checkpoints: complete or absent whatever is killed when, written while training goes on, verified before they are believed.

    with phalanx.Checkpointer("run/checkpoints", comm) as checkpoints:
        step = checkpoints.load(model=model, optimizer=opt, rng=RandomState(), progress=progress) or 0
        ...
        checkpoints.save(step, model=model, optimizer=opt, rng=RandomState(), progress=progress)

All ranks call `save` and `load` together, with the same steps and names. The directory is one that all ranks share.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from phalanx.comm.communicator import Communicator
from phalanx.comm.ending import say_last
from phalanx.train.agree import DamageSeenError, from_rank_0, together, undamaged
from phalanx.train.entries import Saved, capture, compare_plain, differences, fill, kind_of, some, state_of
from phalanx.train.lock import DirectoryLock
from phalanx.train.manifest import CheckpointError, DamagedError, Place, clean, find_places, make_probe
from phalanx.train.random_state import RandomState
from phalanx.train.replicas import compare, find_owners, own_tensors, tabulate
from phalanx.train.restore import Reading, read
from phalanx.train.tree import clone, decode, encode
from phalanx.train.write import Background, HostCopies, Job, explain, write

__all__ = ["CheckpointError", "Checkpointer", "RandomState"]

SEEN_WITHIN = 5.0  # seconds in which a file of rank 0 must be seen by all ranks; network file systems remember what was not there
IN_TOUCH = 1.0  # seconds between two signs of life while a disk is slow
LAST_WORDS = 1.0  # seconds for a write under way when an exception leaves the `with`: the others are waiting to hear of it


class Checkpointer:
    """Saves and loads the state of all ranks in `directory`, and keeps the newest `keep` checkpoints.

    `config` is plain data that says what is trained; a checkpoint with another one is refused. `failed` gets the error of a write
    that failed, at once and in the thread that writes; the next `save` then tries again instead of raising it.
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
        self._newest: int | None = None  # the step last saved or loaded; steps go up
        self._loaded = False
        self._known: frozenset[Place] = frozenset()  # what this one has found or saved; on rank 0
        self._lock: DirectoryLock | None = None  # from the first save on; on rank 0
        self._rejected: frozenset[Place] = frozenset()
        self._closed = False
        self._check_shared()

    # ---- save ----------------------------------------------------------------------------------------------------------------

    def save(self, step: int, **state: Any) -> None:
        """Save `state` as that of `step`. Returns when it is copied; the rest happens in the background.

        A save that finds the one before it still under way waits for it. An error of the one before is raised here, on all
        ranks, and nothing is saved: call it again where the cause is gone.
        """
        self._check_open()
        before = self._finish_together()
        if self._background.failed is not None:
            before = None  # it was told
        entries = together(
            self._comm, lambda: {name: capture(name, obj) for name, obj in self._check(step, state).items()}, before
        )
        self._same_everywhere(step, list(entries))
        staging, place = from_rank_0(self._comm, lambda: self._prepare(step))
        owners = find_owners(compare(tabulate(entries), self._comm)) if self._comm.size > 1 else {}
        own = own_tensors(self._comm.rank, entries, owners)
        job = Job(
            directory=self._directory,
            staging=staging,
            place=Place(*place),
            rank=self._comm.rank,
            world=self._comm.size,
            config=self._config,
            entries={name: replace(entry, tensors={}) for name, entry in entries.items()},
            owners=owners,
            keep=self._keep,
            rejected=self._rejected,
        )
        copies = self._copies.take(own)
        self._newest = step
        self._known |= {job.place}
        lock = DirectoryLock(self._directory) if self._lock else None  # of its own: a write may outlast this Checkpointer

        def work() -> None:
            with lock or nullcontext():
                write(job, copies)

        self._background.start(work)

    def wait(self) -> None:
        """Wait until this rank's part of the last save is on the disk (rank 0: all of it), and raise the error it ended with."""
        if error := self._background.finish():
            raise error

    def _check(self, step: int, state: Mapping[str, Any]) -> Mapping[str, Any]:
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise ValueError(f"step={step!r}: an int, 0 or more")
        if self._newest is not None and step < self._newest:
            raise ValueError(f"step {step} after step {self._newest}: steps go up")
        return _named(state)

    def _prepare(self, step: int) -> tuple[str, tuple[int, int]]:
        """On rank 0: make the directory of a new checkpoint."""
        try:
            new = self._lock is None or not self._lock.stands()
            if new:  # not earlier: to load beside a job that runs needs no lock, and deletes nothing
                self._lock = DirectoryLock(self._directory)
            places = find_places(self._directory)
            self._check_history(places)
            self._known = frozenset(places)
            if new:
                clean(self._directory)
            attempts = [place.attempt for place in places if place.step == step]
            place = Place(step, max(attempts, default=0) + 1)
            staging = place.temporary()
            (self._directory / staging).mkdir()
        except FileNotFoundError:
            raise CheckpointError(f"{self._directory} has disappeared: deleted, or no longer mounted?") from None
        except OSError as error:
            raise CheckpointError(f"cannot write in {self._directory}: {explain(error)}") from None
        return staging, (place.step, place.attempt)

    def _check_history(self, places: list[Place]) -> None:
        """Raise if another run has saved here what this one knows nothing of: their checkpoints would be mixed."""
        strange = max((place for place in places if place not in self._known), default=None)
        if strange is None:
            return
        if not self._loaded and not self._known:
            raise CheckpointError(
                f"{self._directory} holds checkpoints of an earlier run, up to step {strange.step}: load() first to "
                "continue it, or use another directory"
            )
        raise CheckpointError(
            f"{self._directory / strange.name} was saved by another job or Checkpointer since this one last looked: "
            "load() to continue from there, or use another directory"
        )

    # ---- load ----------------------------------------------------------------------------------------------------------------

    def load(self, **state: Any) -> int | None:
        """Fill `state` from the newest intact checkpoint and return its step, or None where there is none yet.

        Nothing is changed unless everything fits on all ranks. A damaged checkpoint is passed over with a warning; one of another
        model or config raises `CheckpointError` with the differences, and so do checkpoints that are all damaged.
        """
        self._check_open()
        together(self._comm, lambda: _named(state), self._finish_together())
        places = [Place(*place) for place in from_rank_0(self._comm, self._find)]
        damages: list[str] = []
        known = frozenset(places)
        for place in places:
            damage = self._restore(place, state)
            if not damage:
                self._newest, self._known, self._loaded = place.step, known, True
                return place.step
            damages.append(damage)
            self._rejected |= {place}
            if self._comm.rank == 0:
                warnings.warn(f"damaged checkpoint, falling back to an older one: {damage}", RuntimeWarning, stacklevel=2)
        if damages:
            raise CheckpointError(f"every checkpoint in {self._directory} is damaged:{some(damages)}")
        self._known, self._loaded = known, True
        return None

    def _find(self) -> list[tuple[int, int]]:
        try:
            return [(place.step, place.attempt) for place in find_places(self._directory)]
        except OSError as error:
            raise CheckpointError(f"cannot read {self._directory}: {explain(error)}") from None

    def _restore(self, place: Place, state: Mapping[str, Any]) -> str:
        """Fill `state`, all of it on all ranks; or nothing on any, and say what damage a rank has seen."""
        try:
            reading = undamaged(self._comm, lambda: read(self._directory, place, state, self._comm.rank, self._comm.size))
            saved = undamaged(self._comm, lambda: self._fitting(reading, place, state))
            backups = together(self._comm, lambda: {name: clone(state_of(obj)) for name, obj in state.items()})
            filled: list[str] = []
            try:
                undamaged(self._comm, lambda: self._fill(place, state, saved, filled))
            except BaseException:
                for name in filled:
                    fill(state[name], backups[name])
                raise
        except DamageSeenError as seen:
            return str(seen)
        return ""

    def _fill(self, place: Place, state: Mapping[str, Any], saved: Mapping[str, Saved], filled: list[str]) -> None:
        for name, obj in state.items():
            filled.append(name)
            with self._blaming(place, name, saved[name].kind):
                fill(obj, saved[name].value)

    @contextmanager
    def _blaming(self, place: Place, name: str, kind: str) -> Iterator[None]:
        """An error of nonsense in the state is that of the checkpoint; any other, such as a full GPU, is not."""
        try:
            yield
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            if kind == "object" and not isinstance(error, (ValueError, TypeError)):  # a mistake in it, as likely
                raise
            told = f"{name} does not take what was saved: {type(error).__name__}: {error}"
            raise DamagedError(self._directory / place.name, told) from error

    def _fitting(self, reading: Reading, place: Place, state: Mapping[str, Any]) -> Mapping[str, Saved]:
        """The saved entries, where they are of this model and config."""
        found = compare_plain("config", decode(self._config, {}), decode(reading.manifest.config, {}))
        found += [f"{name}: only here" for name in state if name not in reading.saved]
        for name, own in reading.saved.items():
            found += differences(name, state[name], own)
        if found:
            raise CheckpointError(
                f"{self._directory / place.name} is of something else, and nothing was loaded; the differences:{some(found)}"
            )
        world = reading.manifest.world
        if world == self._comm.size:
            return reading.saved
        return {
            # one version for all ranks is for all ranks of any world; where every rank had its own, some may go on from it
            name: self._resized(place, name, state[name], own) if world == 1 or reading.versions(name) > 1 else own
            for name, own in reading.saved.items()
        }

    def _resized(self, place: Place, name: str, obj: Any, saved: Saved) -> Saved:
        derive = getattr(obj, "resized", None) if saved.kind == "object" else None
        if derive is None:
            return saved
        with self._blaming(place, name, saved.kind):
            return Saved(saved.kind, derive(saved.value, self._comm.rank, self._comm.size))

    # ---- end -----------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for the write under way, and raise the error it ended with. Idempotent; not a collective call."""
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
            if failure := self._background.finish(LAST_WORDS):
                say_last(f"the last checkpoint is not complete: {failure}")
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()

    # ---- ranks that agree ------------------------------------------------------------------------------------------------------

    def _finish_together(self) -> BaseException | None:
        """Wait until no rank writes any more; the error of this rank's write. A slow disk is not a silent rank."""
        error = None
        while True:
            error = self._background.finish(IN_TOUCH) or error
            if not any(self._comm.allgather_obj(self._background.busy)):
                return error

    def _same_everywhere(self, step: int, names: list[str]) -> None:
        told = self._comm.allgather_obj((step, names))
        odd = [rank for rank, own in enumerate(told) if own != told[0]]
        if odd:
            raise CheckpointError(f"ranks save different things: rank 0 {told[0]}, rank {odd[0]} {told[odd[0]]}")

    def _check_shared(self) -> None:
        """Make the directory, and see that all ranks see the same one."""
        probe = from_rank_0(self._comm, self._place_probe)
        path = self._directory / probe
        deadline = time.monotonic() + SEEN_WITHIN
        while not (seen := path.exists()) and time.monotonic() < deadline:
            time.sleep(0.05)
        told = self._comm.allgather_obj(seen)
        if self._comm.rank == 0:
            path.unlink(missing_ok=True)
        if blind := [str(rank) for rank, own in enumerate(told) if not own]:
            raise CheckpointError(
                f"rank(s) {', '.join(blind)} do not see what rank 0 writes in {self._directory}: checkpoints need a "
                "directory that all ranks share, such as one on a network file system"
            )

    def _place_probe(self) -> str:
        try:
            return make_probe(self._directory)
        except OSError as error:
            raise CheckpointError(f"cannot write in {self._directory}: {explain(error)}") from None

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this Checkpointer is closed")


def _named(state: Mapping[str, Any]) -> Mapping[str, Any]:
    if not state:
        raise ValueError("nothing to save or load: name the state, as in save(step, model=model, optimizer=opt)")
    for name, obj in state.items():
        if not name.isidentifier():
            raise ValueError(f"{name!r} is no name for state: use a Python identifier")
        kind_of(obj, name)
    return state
