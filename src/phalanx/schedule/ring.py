"""The ring: one all-reduce over all ranks, 2(n-1) steps when lowered, each rank sending 2(n-1)/n of the buffer.

Paper: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009; popularised in
deep learning by Gibiansky (Baidu), 2017.

Differences from the paper: none in the moves. The ring follows the rank numbers; `relabel` gives another order.
"""

from __future__ import annotations

from .ops import Collective, Schedule, Step


def ring(n: int) -> Schedule:
    """All-reduce of `n` ranks as one ring.

    Args:
        n: The number of ranks.

    Returns:
        A schedule of one collective; lowered, 2(n-1) steps in which each rank sends 2(n-1)/n of the buffer.

    Raises:
        ValueError: If `n` is less than 1.

    Example:
        >>> phalanx.schedule.latency_steps(phalanx.ring(4))
        6
    """
    if n < 1:
        raise ValueError(f"ring({n}): a world has at least 1 rank; give n >= 1")
    steps = (Step((Collective("all_reduce", tuple(range(n)), range(n)),), "all-reduce"),) if n > 1 else ()
    return Schedule(f"ring({n})", n, n, steps)
