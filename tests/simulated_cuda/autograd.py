"""Backward on a device runs in a thread of autograd's, as with CUDA: hooks and final callbacks are called there.

The calling thread waits. The other thread has the device of the loss as its current one, and the caller's streams.

A gradient is added to its parameter on the stream on which forward first used the parameter. Autograd orders that stream after
the one that made the gradient, and the caller's stream after it before the final callbacks. The other nodes run on the stream of
the caller here, while CUDA runs each on its own stream of forward.

    caller's stream     forward [..]          backward [.. grad of w]-------------.        [final callbacks] [step]
    side stream                 [uses w]                              `-[w.grad += ..]-----'
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.simulated_cuda.conductor import me
from tests.simulated_cuda.device import Stream
from tests.simulated_cuda.simulation import current_stream, simulation
from tests.simulated_cuda.tensor import CudaTensor

_run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]


def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
    """For torch.autograd._engine_run_backward."""
    caller = me()
    device = next((x.get_device() for x in outputs if isinstance(x, CudaTensor)), None)
    if device is None or caller is None or getattr(caller, "in_autograd", False):  # a backward inside a backward stays there
        return _run_backward(outputs, *args, **kwargs)
    answer: list[Any] = []
    error: list[Exception] = []

    def run() -> None:
        mine: Any = me()
        mine.in_autograd, mine.device, mine.streams = True, device, dict(getattr(caller, "streams", {}))
        remove = _on_their_streams(outputs)
        try:
            answer.append(_run_backward(outputs, *args, **kwargs))
        except Exception as caught:  # noqa: BLE001  raised in the thread that called backward
            error.append(caught)
        finally:
            remove()

    conductor = simulation().conductor
    thread = conductor.start(f"{caller.process} autograd", caller.process, run)
    conductor.wait(lambda: thread.finished, None, "backward")
    if error:
        raise error[0]
    return answer[0]


def _on_their_streams(outputs: Any) -> Callable[[], None]:
    """Have gradients added on the streams of their parameters; returns what ends that."""
    leaves = {node: node.variable for node in _nodes(outputs) if hasattr(node, "variable")}
    home = current_stream(outputs[0].block.stream.device)
    away = {node: x.used_on for node, x in leaves.items() if getattr(x, "used_on", home) is not home}
    handles = []
    if away:
        join = lambda: [home.wait(stream.record()) for stream in dict.fromkeys(away.values())]  # noqa: E731
        first = lambda *_: torch.autograd.Variable._execution_engine.queue_callback(join)  # type: ignore[attr-defined]  # noqa: E731
        handles.append(outputs[0].grad_fn.register_prehook(first))
    for node, stream in away.items():
        handles.append(node.register_prehook(_switch(home, stream)))
        handles.append(node.register_hook(lambda *_: _use(home)))

    def end() -> None:
        for handle in handles:
            handle.remove()
        for x in leaves.values():
            vars(x).pop("used_on", None)

    return end


def _switch(home: Stream, stream: Stream) -> Callable[..., None]:
    def switch(grads: Any) -> None:
        stream.wait(home.record())
        for grad in grads:
            if isinstance(grad, CudaTensor):
                grad.block.recorded[stream] = None
        _use(stream)

    return switch


def _use(stream: Stream) -> None:
    me().__dict__["streams"][stream.device] = stream


def _nodes(outputs: Any) -> set[Any]:
    """The graph below these tensors."""
    found: set[Any] = set()
    waiting = [x.grad_fn for x in outputs if x.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += [below for below, _ in node.next_functions if below is not None]
    return found
