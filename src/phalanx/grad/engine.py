"""What autograd's engine tells about the backward that runs now: torch's own calls, used by its DDP and FSDP as well."""

from __future__ import annotations

from collections.abc import Callable

from phalanx._torch_private import graph_task_id, is_inside_a_node, queue_callback


def backward_number() -> int:
    """A number of the backward that runs in this thread; one inside another has a number of its own."""
    return graph_task_id()


def when_backward_ends(call: Callable[[], None]) -> None:
    """Call it at the end of the running backward, before `backward()` returns; an exception of it leaves `backward()`."""
    queue_callback(call)


def is_inner_backward() -> bool:
    """Asked in such a call: whether another backward waits for this one, as reentrant checkpointing makes it do."""
    return is_inside_a_node()
