"""The argument forms in which torch calls a process group.

torch.distributed, DDP and functional collectives pass tensors and an options object, which is the only form that the methods here
accept. Other forms that torch's own groups understand, such as `group.allreduce(x, op)`, go to the plain group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_SUM = dist.ReduceOp.SUM
_OPS = {
    int(op.value): name
    for op, name in (
        (dist.ReduceOp.SUM, "sum"),
        (dist.ReduceOp.AVG, "mean"),
        (dist.ReduceOp.MAX, "max"),
        (dist.ReduceOp.MIN, "min"),
    )
}


def op_of(opts: Any) -> Any:
    """The core's name for a reduction, or None if gloo has to do it."""
    reduction = opts.reduceOp
    # a comparison takes 0.2 us, reading the number 0.6; hashing torch's enum takes as long as the rest of a small call
    return "sum" if reduction == _SUM else _OPS.get(reduction.op.value)


def usual_form(options: type, *names: str) -> Callable[[Any], Any]:
    """Call the method if the last argument is an instance of `options`. Otherwise, or on NotImplemented, call the plain group.

    `names` are the method's names across torch versions, newest first.
    """
    name = next(each for each in names if hasattr(dist.ProcessGroup, each))

    def decorate(method: Callable[..., Any]) -> Any:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **named: Any) -> Any:
            if named and named.keys() == {"opts"}:
                args, named = (*args, named["opts"]), {}
            if not named and args and type(args[-1]) is options:
                work = method(self, *args)
                if work is not NotImplemented:
                    return work
                if _averages_on_host(args):
                    return _average(self, name, args)
            return getattr(self.plain, name)(*args, **named)

        return call

    return decorate


def _averages_on_host(args: tuple[Any, ...]) -> bool:
    """Whether this averages tensors in host memory. gloo only sums, but Lightning averages integers, as NCCL does."""
    if not hasattr(args[-1], "reduceOp") or op_of(args[-1]) != "mean":
        return False
    return all(x.is_cpu and x.dtype is not torch.bool and x.layout is torch.strided for x in _tensors(args[0]))


def _average(group: Any, name: str, args: tuple[Any, ...]) -> Any:
    """Sum with the plain group, then divide. Integers round towards zero, as with NCCL."""
    *tensors, opts = args
    sums = type(opts)()
    sums.reduceOp, sums.timeout = dist.ReduceOp.SUM, opts.timeout
    outputs, size = _tensors(args[0]), group.size()

    def work() -> None:
        getattr(group.plain, name)(*tensors, sums).wait()
        for x in outputs:
            x.detach().div_(size, rounding_mode=None if x.is_floating_point() or x.is_complex() else "trunc")

    return group.start(f"{name}, average", work, outputs, opts)


def _tensors(x: Any) -> list[torch.Tensor]:
    return [x] if isinstance(x, torch.Tensor) else list(x)
