"""The forms in which torch calls a process group.

The functions of torch.distributed, DDP and functional collectives pass tensors and an object with options. Methods here have that
form alone. Whatever else torch's own process groups understand, such as `group.allreduce(x, op)`, goes to the plain group.
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
    """The core's name of a reduction; None for those that gloo does."""
    reduction = opts.reduceOp
    # a comparison takes 0.2 us, the number 0.6; to hash torch's enum takes as long as the rest of a small call
    return "sum" if reduction == _SUM else _OPS.get(reduction.op.value)


def usual_form(options: type, *names: str) -> Callable[[Any], Any]:
    """Call the method if the last argument is an object of `options`. Otherwise, and if it returns None, call the plain group.

    `names` are those of the method in the versions of torch, the newest first.
    """
    name = next(each for each in names if hasattr(dist.ProcessGroup, each))

    def decorate(method: Callable[..., Any]) -> Any:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **named: Any) -> Any:
            if len(named) == 1 and "opts" in named:
                args, named = (*args, named["opts"]), {}
            if args and type(args[-1]) is options and not named:
                work = method(self, *args)
                if work is not None:
                    return work
                if _averages_on_host(args):
                    return _average(self, name, args)
            return getattr(self.plain, name)(*args, **named)

        return call

    return decorate


def _averages_on_host(args: tuple[Any, ...]) -> bool:
    """Whether this is an average of numbers in host memory. gloo only has sums. Lightning averages integers, as NCCL does."""
    if not hasattr(args[-1], "reduceOp") or op_of(args[-1]) != "mean":
        return False
    return all(x.is_cpu and x.dtype is not torch.bool and x.layout is torch.strided for x in _tensors(args[0]))


def _average(group: Any, name: str, args: tuple[Any, ...]) -> Any:
    """The sum by the plain group, divided; of integers towards zero, as NCCL does it."""
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
