"""Mixes the tensors of a replica with those of a partner.

    x    a tensor of this rank, now            sent    its value when the message was sent
    received    the partner's, of the same step

    drifted tensors (parameters, optimizer state)     x + (received - sent) w
    averaged tensors (batch norm statistics)          x (1 - w) + received w           w is 1/2 in most rounds

The first rule keeps everything this rank did while the message was in flight. Because every message is received once, it also
keeps the mean of all ranks, even if the message was rounded to 16 bits. The second rule cannot make a variance negative.

On a GPU torch's multi-tensor operations are one kernel for many tensors only if all of them have the same device and dtype.
Otherwise they are one kernel per tensor, and some versions copy wrongly (pytorch/pytorch#173383). So tensors are sorted by kind
there. On a CPU it makes no difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from phalanx._torch_private import foreach_add_, foreach_copy_, foreach_mul_, foreach_sub_

WIDENED = 64 << 20  # bytes of 16-bit tensors to widen at a time, so that their copies do not fill a GPU's memory

Tensors = list[torch.Tensor]


def alike(*lists: Sequence[torch.Tensor]) -> Iterator[tuple[Tensors, ...]]:
    """Split the lists into parts in which all tensors of a list have one device and dtype."""
    kinds: dict[tuple[object, ...], list[tuple[torch.Tensor, ...]]] = {}
    for row in zip(*lists, strict=True):
        kinds.setdefault(tuple((x.device, x.dtype) for x in row), []).append(row)
    for rows in kinds.values():
        yield tuple(list(column) for column in zip(*rows, strict=True))


def copy_all(to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
    """Copy each tensor of `source` into that of `to`."""
    for into, xs in _parts(to, source):
        foreach_copy_(into, xs)


def shares(tensors: Sequence[torch.Tensor], received: Sequence[torch.Tensor], weight: float = 0.5) -> None:
    """Mix each with what was received. With halves, both sides of a pair get the same bits."""
    for xs, rs in _parts(tensors, received):
        foreach_mul_(xs, 1 - weight)
        for some, theirs in [(xs, rs)] if xs[0].is_cpu else widened(xs, rs):
            foreach_add_(some, theirs, alpha=weight)


def drift(
    tensors: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], weight: float = 0.5
) -> None:
    """Move each half the way, or by another `weight`, from what was sent to what was received, and keep later changes.

    `received` is overwritten.
    """
    for xs, ss, rs in _parts(tensors, sent, received):
        if all(x.dtype == r.dtype for x, r in zip(xs, rs)):
            foreach_sub_(rs, ss)
            foreach_add_(xs, rs, alpha=weight)
        elif xs[0].is_cpu:  # tensor by tensor, so that each stays in the cache
            for x, s, r in zip(xs, ss, rs):
                x.add_(r.to(x.dtype).sub_(s), alpha=weight)
        else:
            drift_widened(xs, ss, rs, weight)


def drift_widened(xs: Tensors, sent: Tensors, received: Tensors, weight: float = 0.5) -> None:
    """`drift` for tensors of one dtype and 16-bit messages: the difference is computed in full precision, for many at once."""
    for some, mine, theirs in widened(xs, sent, received):
        foreach_sub_(theirs, mine)
        foreach_add_(some, theirs, alpha=weight)


def widened(xs: Tensors, *narrow: Tensors) -> Iterator[tuple[Tensors, ...]]:
    """Yield `xs` and the others in the dtype of `xs`, unchanged or as copies of WIDENED bytes at a time."""
    if all(ys[0].dtype == xs[0].dtype for ys in narrow):
        yield xs, *narrow
        return
    at = 0
    while at < len(xs):
        end, size = at + 1, narrow[0][at].nbytes
        while end < len(xs) and size + narrow[0][end].nbytes <= WIDENED:
            size += narrow[0][end].nbytes
            end += 1
        copies = [[torch.empty_like(x) for x in xs[at:end]] for _ in narrow]
        for wide, ys in zip(copies, narrow):
            foreach_copy_(wide, ys[at:end])
        yield xs[at:end], *copies
        at = end


def _parts(*lists: Sequence[torch.Tensor]) -> Iterator[tuple[Tensors, ...]]:
    """Yield the lists as one multi-tensor operation takes them."""
    if not lists[0]:
        return
    if lists[0][0].is_cpu:
        yield tuple(list(each) for each in lists)
    else:
        yield from alike(*lists)
