"""What an asynchronous call returns: a `Work` that DDP's reducer, functional collectives and you can wait for."""

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

# torch 2.6 drops the Python half of a Work that C++ holds, and then waits for ever (pytorch/pytorch#146376, in 2.7)
DROPS_PYTHON = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7)


class Task(dist.Work):
    """One collective of a lane: what is to be done, and how it ended. `name` is for errors, `tensors` are the result."""

    def __init__(self, name: str, work: Callable[[], None], tensors: Sequence[torch.Tensor], lane: Lane) -> None:
        super().__init__()
        self.name, self._work, self._tensors, self._lane = name, work, list(tensors), lane
        self._error: BaseException | None = None
        self._done = False
        self._changing = threading.Lock()
        self._finished: threading.Event | None = None  # made by the first thread that has to wait
        self._begun: Any = None  # a future that completes with this, and the one that callers get
        self._future: Any = None
        # inference mode belongs to a thread: without the caller's mode another thread could not write to the caller's tensors
        self._inference = torch.is_inference_mode_enabled() or any(x.is_inference() for x in tensors)

    # ---- for the lane ------------------------------------------------------------------------------------------------------

    def run(self, explain: Callable[[str, BaseException], BaseException]) -> BaseException | None:
        """Do it in this thread. Returns why it failed, as users should read it."""
        try:
            with torch.inference_mode(self._inference):
                self._work()
        except BaseException as error:  # noqa: BLE001  raised in the thread that waits
            return explain(self.name, error)
        return None

    def end(self, error: BaseException | None) -> None:
        """It is over, or will never happen."""
        with self._changing:
            self._error, self._done = error, True
            self._work = nothing  # holds tensors that are not in the result
            finished, begun = self._finished, self._begun
        if finished is not None:
            finished.set()
        if begun is not None:
            begun.set_result(None)

    # ---- for torch ---------------------------------------------------------------------------------------------------------

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Wait until it is over; raise if it failed. torch passes a timeout of 0 where you passed none."""
        if not self._done and timeout:
            self._lane.release()
        elif not self._done:
            self._lane.run_until(self)  # this thread has nothing else to do
        if not self._done:
            with self._changing:
                if self._finished is None:
                    self._finished = threading.Event()
                if self.is_completed():  # meanwhile
                    self._finished.set()
            seconds = timeout.total_seconds() if timeout else None
            if not self._finished.wait(seconds):
                raise RuntimeError(f"{self.name}: Timed out waiting {seconds:g} s for it; it is still under way")
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> Any:
        """Its tensors as a future."""
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
        """Whether it is over. Returns at once."""
        return self._done

    def is_success(self) -> bool:
        """Whether it is over and worked."""
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        """Why it failed."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Its tensors, after `wait`."""
        return self._tensors

    def synchronize(self) -> None:
        """As `wait`: on the CPU there is no stream to order."""
        self.wait()


class Done(dist.Work):
    """A collective that was over when the call returned."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = list(tensors)

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Nothing to wait for."""
        return True

    def get_future(self) -> Any:
        """Its tensors as a future."""
        future: Any = torch.futures.Future()
        future.set_result(self._tensors)
        return future

    def is_completed(self) -> bool:
        """Yes."""
        return True

    def is_success(self) -> bool:
        """Yes."""
        return True

    def exception(self) -> None:
        """None: the call would have raised it."""

    def result(self) -> list[torch.Tensor]:
        """Its tensors."""
        return self._tensors

    def synchronize(self) -> None:
        """Nothing to wait for."""


def for_torch(work: Task | Done) -> Any:
    """The same work as this version of torch can keep it."""
    return work_of(work.get_future()) if DROPS_PYTHON else work


def nothing() -> None:
    """Work that is done."""
