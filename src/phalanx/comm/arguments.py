"""Checks the arguments of a verb in the calling thread, before anything is sent. Errors name the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from phalanx.comm.envelope import DTYPES, MOST_DIMS
from phalanx.schedule import Schedule, ScheduleError, lower, verify


def check_tensor(x: Any) -> None:
    """Raise unless `x` is a dense tensor with a supported dtype and device."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"expected a torch.Tensor, got {type(x).__name__}: send plain objects with the methods that end in _obj")
    if x.dim() > MOST_DIMS:
        raise TypeError(f"cannot send a tensor of {x.dim()} dimensions, at most {MOST_DIMS}: call .flatten() first")
    if x.layout is not torch.strided:
        raise TypeError(f"cannot send a {x.layout} tensor: call .to_dense() first")
    if x.device.type not in ("cpu", "cuda"):
        raise TypeError(f"cannot send a tensor on {x.device}: move it to cpu or cuda first")
    if x.dtype not in DTYPES:
        raise TypeError(f"cannot send {x.dtype}: use one of {', '.join(str(d).removeprefix('torch.') for d in DTYPES)}")


def check_in_place(x: torch.Tensor) -> None:
    """Raise if elements of `x` share memory, as in an expanded tensor."""
    if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape)):
        raise ValueError(
            f"{text_of(x)} was expanded: several elements share memory, so it cannot be written to; call .clone() first"
        )


def check_op(op: str) -> None:
    """Raise unless `op` is one of the four reductions."""
    if op not in ("sum", "mean", "max", "min"):
        raise ValueError(f"op={op!r}: use sum, mean, max or min")


def check_reduction(x: torch.Tensor, op: str) -> None:
    """Raise unless `op` can reduce `x` to its own dtype."""
    check_tensor(x)
    check_op(op)
    if op == "mean" and not (x.is_floating_point() or x.is_complex()):
        raise TypeError(f"the mean of {x.dtype} is not a {x.dtype}: reduce with sum, or call x.float() first")
    if op in ("max", "min") and x.is_complex():
        raise TypeError(f"complex numbers have no {op}")


def text_of(x: torch.Tensor) -> str:
    """Describe a tensor as `float32[64, 3]`. Ranks must agree on it."""
    return kind_of(x.dtype, x.shape)


def kind_of(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """Describe a tensor that may no longer exist by its dtype and shape."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def check_rank(rank: int, name: str, size: int) -> None:
    """Raise unless `rank` is a rank of a communicator of `size`."""
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < size:
        raise ValueError(f"{name}={rank!r} is not a rank of this communicator: 0 to {size - 1}")


def check_peer(rank: int, name: str, size: int, me: int) -> None:
    """Raise unless `rank` is a rank other than `me`."""
    check_rank(rank, name, size)
    if rank == me:
        raise ValueError(f"{name}={rank} is this rank itself: sending to yourself would deadlock")


def check_tag(tag: int) -> None:
    """Raise unless `tag` is an int. True is refused, because it would never match the 1 of another rank."""
    if isinstance(tag, bool) or not isinstance(tag, int):
        raise TypeError(f"tag={tag!r}: use a whole number, the same on both ranks")


def check_all_reduce(algorithm: Schedule, size: int, whose: str) -> None:
    """Verify, before anything is sent, that the schedule is an all-reduce for the `size` ranks of `whose`."""
    if algorithm.world != size:
        raise ScheduleError(f"{algorithm.name} is for {algorithm.world} ranks, but {whose} has {size}")
    if algorithm.goal != "sum":
        raise ScheduleError(f"{algorithm.name} computes a {algorithm.goal}, not the sum that an all-reduce is")
    if algorithm.coded:
        raise ScheduleError(
            f"{algorithm.name} rounds what it sums, and not everything may be rounded: pass wire=phalanx.Int8() to"
            " create_multi_node_optimizer, which runs it for gradients"
        )
    verify(algorithm, bitwise=True)  # replicas must stay equal
    verify(lower(algorithm))


def check_list(xs: Sequence[torch.Tensor] | None, verb: str, who: str, size: int) -> None:
    """Raise unless `xs` is a list with one tensor per rank."""
    if not isinstance(xs, list | tuple) or len(xs) != size:
        got = f"{len(xs)} elements" if isinstance(xs, list | tuple) else type(xs).__name__
        raise ValueError(f"{verb}: {who} a list of {size} tensors, one per rank; got {got}")
    for x in xs:
        check_tensor(x)
