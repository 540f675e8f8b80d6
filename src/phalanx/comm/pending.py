"""One communication on its way: `Operation` is the issuing thread's end of it, `Pending` the caller's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from phalanx.comm.streams import StreamOrder


class Operation:
    """What the communication is called, which ranks take part, the work, and how it ended."""

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
        self.may_fail = may_fail  # the caller handles its failure, and nothing else breaks
        self.work, self.order = work, order
        self.landing = landing  # waits for what `work` has only begun; later operations do not wait for it
        self.finished = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None
        self.alive = time.monotonic()  # when it last made progress: started, or finished a step
        self.ended = 0.0  # when it was over, by time.perf_counter(); on a GPU, when it was queued

    def __str__(self) -> str:
        return self.name


class Waiter(Protocol):
    """What waits for operations: the issuer."""

    def finish(self, operation: Operation) -> None: ...
    def settle(self, operation: Operation, seconds: float) -> BaseException | None: ...


class Pending:
    """A communication under way, as `all_reduce_async` returns it.

    Example:
        >>> with phalanx.create_communicator() as comm:
        ...     pending = comm.all_reduce_async(torch.ones(2))
        ...     pending.wait().tolist()
        [1.0, 1.0]
    """

    def __init__(self, operation: Operation, issuer: Waiter) -> None:
        self._operation, self._issuer = operation, issuer

    def done(self) -> bool:
        """Whether it is over. Returns at once."""
        return self._operation.finished.is_set() and self._operation.order.done()

    def wait(self) -> Any:
        """Wait until it is over.

        Returns:
            The result: for `all_reduce_async` the tensor.

        Raises:
            CommunicationError: It cannot finish; the error names the missing ranks.
        """
        self._issuer.finish(self._operation)
        self._operation.order.join()
        return self._operation.result

    def settle(self, seconds: float) -> BaseException | None:
        """For an exchange that may fail: wait at most `seconds`, and return why it did not arrive, or None if it did."""
        return self._issuer.settle(self._operation, seconds)

    @property
    def ended(self) -> float:
        """When it was over, by `time.perf_counter()`; on a GPU, when it was queued. Read it after `wait()`."""
        return self._operation.ended
