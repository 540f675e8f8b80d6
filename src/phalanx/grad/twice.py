"""Detects gradients that are averaged twice: by a multi-node optimizer, and by DistributedDataParallel around the same model.

torch does not reveal which parameters DDP reduces, but the result is visible. At the end of backward DDP writes its means into
every `p.grad`, after our own callback, which was queued first. So we check the gradients again after all callbacks. If one was
written in between, we did not write it. The version counter shows that, so nothing is copied.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from phalanx._torch_private import queue_callback, version_of
from phalanx.comm.communicator import Communicator
from phalanx.grad.engine import EndOfBackward

AVERAGED = "Every gradient is sent twice, and only the other mean counts"
GOSSIPED = "All replicas get the same gradients from it, so gossip saves nothing"


class SecondAverage:
    """Warns once, on rank 0, if other code writes gradients at the end of a backward. `consequence` states what that means.

    An optimizer without hooks of its own passes its parameters. Then hooks on them call `expect`, until `stop`.
    """

    def __init__(self, comm: Communicator, consequence: str, params: Sequence[torch.nn.Parameter] = ()) -> None:
        self._comm, self._consequence = comm, consequence
        self._end = EndOfBackward(self._note)
        self._params: Sequence[torch.nn.Parameter] = ()
        self._noted: list[tuple[torch.nn.Parameter, torch.Tensor, int]] = []
        self._handles: list[Any] = []
        self._done = comm.size == 1
        weakref.finalize(self, _remove, self._handles)
        if params and not self._done:
            self._watch(params)

    def expect(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Check all gradients at the end of this backward. Call it for every gradient, after our own callback was queued."""
        if not self._done:
            self._params = params
            self._end.expect()

    def _watch(self, params: Sequence[torch.nn.Parameter]) -> None:
        look = weakref.WeakMethod(self.expect)

        def computed(_: torch.Tensor) -> None:
            if (expect := look()) is not None:
                expect(params)

        self._handles += [p.register_post_accumulate_grad_hook(computed) for p in params if p.is_leaf and p.requires_grad]

    def stop(self) -> None:
        """Remove the hooks: what did not happen before the first step will not happen later."""
        _remove(self._handles)

    def _note(self) -> None:
        self._noted = [(p, p.grad, version_of(p.grad)) for p in self._params if p.grad is not None]
        queue_callback(_calling(weakref.WeakMethod(self._look)))  # the engine allows this in a callback, and calls it last

    def _look(self) -> None:
        written = sum(p.grad is not grad or version_of(grad) != version for p, grad, version in self._noted)
        self._noted.clear()
        if written and not self._done:
            self._done = True
            if self._comm.rank == 0:
                warnings.warn(
                    f"DistributedDataParallel, or something like it, averages the gradients of this optimizer as well: {written} "
                    f"of them were written at the end of backward(), and not by Phalanx. {self._consequence}. Use one of the "
                    "two: either train the bare model with this optimizer, or keep DistributedDataParallel with a plain torch "
                    'optimizer and init_process_group("phalanx") or phalanx.ddp_hook. For Lightning, accelerate and Hugging '
                    "Face's Trainer see docs/frameworks.md. You get this warning once",
                    stacklevel=2,
                )


def _calling(method: weakref.WeakMethod[Callable[[], None]]) -> Callable[[], None]:
    def call() -> None:
        if (bound := method()) is not None:
            bound()

    return call


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()
