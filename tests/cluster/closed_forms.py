"""Textbook times of algorithms on a uniform cluster: what `simulate` must say where these hold, and fast where that is enough.

`a` is the latency of a message in seconds, `b` the seconds per byte, `s` the bytes of the buffer; every rank has its own port.
"""

from __future__ import annotations

from math import log2, prod


def ring_seconds(n: int, s: float, a: float, b: float) -> float:
    """2(n-1) messages of s/n bytes, one after the other."""
    return 2 * (n - 1) * (a + s / n * b)


def torus_seconds(dims: tuple[int, ...], s: float, a: float, b: float) -> float:
    """Reduce-scatter along every axis but the first, all-reduce along the first, all-gather back; each axis on what is left."""
    seconds, left = 0.0, s
    for size in reversed(dims[1:]):
        left /= size
        seconds += 2 * (size - 1) * (a + left * b)
    return seconds + ring_seconds(dims[0], s / prod(dims[1:]), a, b)


def halving_doubling_seconds(n: int, s: float, a: float, b: float) -> float:
    """log2(n) halvings and as many doublings of a power of two of ranks."""
    return 2 * log2(n) * a + 2 * s * b * (n - 1) / n


def recursive_doubling_seconds(n: int, s: float, a: float, b: float) -> float:
    """log2(n) exchanges of the whole buffer, n a power of two."""
    return log2(n) * (a + s * b)


def tree_seconds(steps: int, chunks: int, s: float, a: float, b: float) -> float:
    """A pipelined tree whose every step moves one chunk over every edge, where no two edges share a port."""
    return steps * (a + s / chunks * b)


def hierarchical_seconds(hosts: int, per_host: int, s: float, inside: tuple[float, float], between: tuple[float, float]) -> float:
    """A chain to each host's leader, a ring of leaders, a chain back; `inside` and `between` are pairs (a, b)."""
    return 2 * (per_host - 1) * (inside[0] + s * inside[1]) + ring_seconds(hosts, s, *between)
