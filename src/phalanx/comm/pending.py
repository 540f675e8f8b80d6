"""One pending communication: `Operation` is the issuing thread's end of it, `Pending` the caller's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from phalanx.comm.streams import StreamOrder


class Operation:
    """A communication: its name, the ranks that take part, the work, and how it ended."""

    def __init__(
        self,
        comm: str,
        number: int,
        name: str,
        members: Mapping[int, int],
        work: Callable[[], Any],
        order: StreamOrder,
        landing: Callable[[], None] | None = None,
        *,
        may_fail: bool = False,
    ) -> None:
        self.comm, self.number, self.name, self.members = comm, number, name, members
        self.may_fail = may_fail  # the caller handles a failure, and nothing else breaks
        self.work, self.order = work, order
        self.landing = landing  # waits for what `work` has only started; later operations do not wait for it
        self.finished = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None
        self.alive = time.monotonic()  # when it last made progress: started, or finished a step
        self.ended = 0.0  # when it ended, by time.perf_counter(); on a GPU, when it was queued

    def __str__(self) -> str:
        return self.name

    @property
    def on_device(self) -> bool:
        """Whether it was queued on a GPU, where it may still be running when it is `finished`."""
        return self.order.device is not None

    def without_tensors(self) -> Operation:
        """Return a copy to watch, which keeps no tensor alive."""
        return Operation(self.comm, self.number, self.name, self.members, lambda: None, self.order, may_fail=self.may_fail)


class Waiter(Protocol):
    """The object that waits for operations."""

    def finish(self, operation: Operation) -> None: ...
    def finish_on_device(self, operation: Operation) -> None: ...
    def settle(self, operation: Operation, seconds: float) -> BaseException | None: ...


class Pending:
    """A pending communication, as returned by `all_reduce_async`.

    Example:
        >>> with phalanx.create_communicator() as comm:
        ...     pending = comm.all_reduce_async(torch.ones(2))
        ...     pending.wait().tolist()
        [1.0, 1.0]
    """

    def __init__(self, operation: Operation, waiter: Waiter) -> None:
        self._operation, self._waiter = operation, waiter

    def done(self) -> bool:
        """Return whether it has ended, without waiting."""
        return self._operation.finished.is_set() and self._operation.order.done()

    def wait(self) -> Any:
        """Wait until it has ended.

        Returns:
            The result: for `all_reduce_async` the tensor.

        Raises:
            CommunicationError: It cannot finish; the error names the missing ranks.
        """
        self._waiter.finish(self._operation)
        self._operation.order.join(self._operation.result)
        return self._operation.result

    def wait_for_device(self) -> None:
        """Wait until the GPU has finished it. `wait()` does not do that."""
        self._waiter.finish(self._operation)
        self._waiter.finish_on_device(self._operation)

    def settle(self, seconds: float) -> BaseException | None:
        """Wait at most `seconds` for an exchange that may fail. Return why it did not arrive, or None if it did."""
        error = self._waiter.settle(self._operation, seconds)
        if error is None:
            self._operation.order.join(self._operation.result)
        return error

    @property
    def queued(self) -> bool:
        """Whether all of it is queued on a GPU, so that `wait()` does not block."""
        return self._operation.on_device and self._operation.finished.is_set() and self._operation.error is None

    def as_future(self, device: torch.device) -> torch.futures.Future[Any]:
        """Return its result as a torch future. Call it only if it is `queued`."""
        future: Any = torch.futures.Future(devices=[device])
        self._operation.order.complete(future, self._operation.result)
        return future

    @property
    def ended(self) -> float:
        """When it ended, by `time.perf_counter()`; on a GPU, when it was queued. Read it after `wait()`."""
        return self._operation.ended
