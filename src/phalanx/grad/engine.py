"""A callback at the end of a backward pass, through the calls of autograd's engine that DDP and FSDP use, too."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from phalanx._torch_private import graph_task_id, is_inside_a_node, queue_callback


class EndOfBackward:
    """Calls `method` at the end of every backward in which it was `expect`ed, as long as its object lives."""

    def __init__(self, method: Callable[[], None]) -> None:
        self._method = weakref.WeakMethod(method)
        self._number = -1  # of the last backward whose end was expected

    def expect(self) -> None:
        """Call `method` at the end of the running backward. If it raises, `backward()` raises."""
        number = graph_task_id()  # a backward inside another has a number of its own
        if number != self._number:
            self._number = number
            queue_callback(_calling(self._method))


def _calling(method: weakref.WeakMethod[Callable[[], None]]) -> Callable[[], None]:
    def call() -> None:
        bound = method()
        # reentrant checkpointing runs a backward inside another, which waits for it: that is not the end
        if bound is not None and not is_inside_a_node():
            bound()

    return call
