"""The torus: reduce-scatter along every axis but the first, all-reduce along the first, all-gather back.

Paper: Mikami, Suganuma, U-chupala, Tanaka, Kageyama, "Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash",
arXiv 1811.05233 (the 2D-Torus). With X columns and Y rows, it takes 2(X-1) + 2(Y-1) steps when lowered, not the ring's 2(XY-1),
and only 1/X of the buffer moves vertically.

Differences from the paper: any number of axes, not only two. The paper's horizontal direction is the last axis, whose ranks are
contiguous, so `torus(hosts, per_host)` keeps the bulk of the traffic inside the hosts. Axes of size 1 cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from .ops import Collective, Kind, Op, Schedule, Step


def torus(*dims: int) -> Schedule:
    """All-reduce on a grid of ranks: Sony's 2D-torus, for any number of axes.

    Ranks are numbered row by row, so `torus(rows, cols)` is `rows` hosts of `cols` ranks each.

    Args:
        *dims: The sizes of the axes, the slowest network first.

    Returns:
        A schedule for `prod(dims)` ranks: reduce-scatter along every axis but the first, all-reduce along the first, all-gather
        back.

    Raises:
        ValueError: If there is no axis, or an axis is smaller than 1.

    Example:
        >>> s = phalanx.torus(4, 8)
        >>> s.world, phalanx.schedule.latency_steps(s), phalanx.schedule.latency_steps(phalanx.ring(32))
        (32, 20, 62)
    """
    name = f"torus({'x'.join(map(str, dims))})"
    if not dims:
        raise ValueError("torus(): a grid has at least 1 axis; give sizes such as torus(4, 8)")
    if min(dims) < 1:
        raise ValueError(f"{name}: axis {dims.index(min(dims))} has size {min(dims)}; give sizes >= 1")
    world = prod(dims)
    inner = [axis for axis in reversed(range(1, len(dims))) if dims[axis] > 1]
    scatter = [_along(dims, axis, "reduce_scatter") for axis in inner]
    across = [_along(dims, 0, "all_reduce")] if dims[0] > 1 else []
    gather = [_along(dims, axis, "all_gather") for axis in reversed(inner)]
    return Schedule(name, world, world, tuple(scatter + across + gather))


def _along(dims: tuple[int, ...], axis: int, kind: Kind) -> Step:
    """One collective per line of the grid parallel to `axis`, on the part that the line's ranks own at that point."""
    stride = prod(dims[axis + 1 :])
    ops: list[Op] = []
    for first, part in _lines(dims, axis):
        group = tuple(range(first, first + stride * dims[axis], stride))
        ops.append(Collective(kind, group, part))
    return Step(tuple(ops), f"{kind.replace('_', '-')} along {_axis_name(len(dims), axis)}")


def _lines(dims: tuple[int, ...], axis: int) -> Iterator[tuple[int, range]]:
    """The first rank of every line parallel to `axis`, and the chunks left after reduce-scatters along the later axes."""
    world, stride = prod(dims), prod(dims[axis + 1 :])
    parts = []
    for inside in range(stride):  # the coordinates on the axes after `axis`, row-major
        part, rest, width = range(world), inside, stride
        coordinates = []
        for size in dims[axis + 1 :]:
            width //= size
            coordinates.append(rest // width)
            rest %= width
        for size, coordinate in zip(reversed(dims[axis + 1 :]), reversed(coordinates), strict=True):
            length = len(part) // size
            part = part[coordinate * length : (coordinate + 1) * length]
        parts.append(part)
    for outside in range(0, world, stride * dims[axis]):
        for inside, part in enumerate(parts):
            yield outside + inside, part


def _axis_name(axes: int, axis: int) -> str:
    """Moving along the last axis is moving along a row, as in the paper's picture."""
    names = {1: ["axis 0"], 2: ["columns", "rows"]}
    return names.get(axes, [f"axis {i}" for i in range(axes)])[axis]
