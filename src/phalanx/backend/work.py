"""The handle that an asynchronous call returns: a `Work` that DDP's reducer, functional collectives and you can wait for."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from phalanx._torch_private import work_of

if TYPE_CHECKING:
    from phalanx.backend.lane import Lane

# torch 2.6 drops the Python half of a Work that C++ holds, and then hangs (pytorch/pytorch#146376, fixed in 2.7)
DROPS_PYTHON = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7)


class Task(dist.Work):
    """One collective of a lane: the work and its outcome. `name` is for errors, `tensors` are the result."""

    def __init__(self, name: str, work: Callable[[], None], tensors: Sequence[torch.Tensor], lane: Lane) -> None:
        super().__init__()
        self.name, self._work, self._tensors, self._lane = name, work, list(tensors), lane
        self._error: BaseException | None = None
        self._done = False
        self._changing = threading.Lock()
        self._finished: threading.Event | None = None  # made by the first thread that has to wait
        self._begun: Any = None  # a future that completes with this task, and the one derived from it for callers
        self._future: Any = None
        # inference mode is per thread: without the caller's mode, another thread could not write to the caller's tensors
        self._inference = torch.is_inference_mode_enabled() or any(x.is_inference() for x in tensors)

    # ---- for the lane ------------------------------------------------------------------------------------------------------

    def run(self, explain: Callable[[str, BaseException], BaseException]) -> BaseException | None:
        """Do the work in this thread. Returns the error to show to users if it failed."""
        try:
            with torch.inference_mode(self._inference):
                self._work()
        except BaseException as error:  # noqa: BLE001  raised in the thread that waits
            return explain(self.name, error)
        return None

    def end(self, error: BaseException | None) -> None:
        """Mark the task as finished, or as one that will never run."""
        with self._changing:
            self._error, self._done = error, True
            self._work = nothing  # frees tensors that are not part of the result
            finished, begun = self._finished, self._begun
        if finished is not None:
            finished.set()
        if begun is not None:
            begun.set_result(None)

    # ---- for torch ---------------------------------------------------------------------------------------------------------

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Wait until the task is finished; raise if it failed. If you pass no timeout, torch passes 0."""
        if not self._done and timeout:
            self._lane.release()
        elif not self._done:
            self._lane.run_until(self)  # this thread has nothing else to do
        if not self._done:
            with self._changing:
                if self._finished is None:
                    self._finished = threading.Event()
                if self.is_completed():  # finished in the meantime
                    self._finished.set()
            seconds = timeout.total_seconds() if timeout else None
            if not self._finished.wait(seconds):
                raise RuntimeError(f"{self.name}: Timed out waiting {seconds:g} s for it; it is still under way")
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> Any:
        """A future that yields the tensors."""
        with self._changing:
            done, made = self._done, self._begun is None
            if made:
                self._begun = torch.futures.Future()
                # an error must come out of a callback: Future.set_exception only stores it as a value, which C++ cannot read
                self._future = self._begun.then(self._outcome)
        if done and made:
            self._begun.set_result(None)
        return self._future

    def _outcome(self, begun: Any) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._tensors

    def is_completed(self) -> bool:
        """Whether the task is finished. Does not block."""
        return self._done

    def is_success(self) -> bool:
        """Whether the task finished without an error."""
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        """The error, if it failed."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensors, after `wait`."""
        return self._tensors

    def synchronize(self) -> None:
        """Same as `wait`: there is no stream to order on the CPU."""
        self.wait()


class Done(dist.Work):
    """A collective that was complete when the call returned."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = list(tensors)

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Return at once."""
        return True

    def get_future(self) -> Any:
        """A future that yields the tensors."""
        future: Any = torch.futures.Future()
        future.set_result(self._tensors)
        return future

    def is_completed(self) -> bool:
        """Always true."""
        return True

    def is_success(self) -> bool:
        """Always true."""
        return True

    def exception(self) -> None:
        """Always None: the call itself would have raised."""

    def result(self) -> list[torch.Tensor]:
        """The tensors."""
        return self._tensors

    def synchronize(self) -> None:
        """Return at once."""


def for_torch(work: Task | Done) -> Any:
    """Wrap the work in a form that this version of torch keeps alive."""
    return work_of(work.get_future()) if DROPS_PYTHON else work


def nothing() -> None:
    """Do nothing: the work of a finished task."""
