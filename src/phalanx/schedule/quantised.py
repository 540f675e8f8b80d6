"""The quantised all-reduce: data between hosts is encoded, for example in 8 bits; sums are in full precision.

Each rank sends part j of its buffer, encoded, directly to rank j, which sums what it gets in full precision, encodes the sum and
sends it to all. So every contribution is rounded twice for any number of ranks; a ring would round it at every hop. Ranks of a
host first reduce-scatter among themselves without encoding, and each exchanges its part with its peers on the other hosts.

Papers: Alistarh et al., "QSGD", arXiv 1610.02132 (gradients as few bits per block with one scale); Tang et al., "DoubleSqueeze",
arXiv 1905.05957 (both ways compressed, each with its own error feedback); Tang et al., "1-bit Adam", arXiv 2102.02888 (the
compressed all-reduce as all-to-all, average, all-gather).

Differences from the papers: no server and no second stage of servers: each rank serves one part. Inside a host nothing
is compressed; a rank's own contribution to its part is not rounded before the sum.
"""

from __future__ import annotations

from .ops import Collective, Kind, Move, Op, Recode, Schedule, Step


def quantised(hosts: int, per_host: int = 1) -> Schedule:
    """All-reduce that encodes the data between hosts.

    Args:
        hosts: The number of hosts. With `per_host=1` it is the number of ranks.
        per_host: The ranks per host, with contiguous numbers.

    Returns:
        A schedule: reduce-scatter inside hosts, encode, exchange between hosts, encode the sums, exchange them, decode,
        all-gather inside hosts. Every contribution is encoded at most twice.

    Raises:
        ValueError: If there is not at least 1 host and 1 rank per host.

    Example:
        >>> s = phalanx.schedule.quantised(4, 2)
        >>> s.coded, phalanx.schedule.latency_steps(s)
        (True, 4)
    """
    name = f"quantised({hosts}x{per_host})"
    if hosts < 1 or per_host < 1:
        raise ValueError(f"{name}: there is at least 1 host and 1 rank per host; give sizes >= 1")
    world = hosts * per_host
    groups = [tuple(range(first, first + per_host)) for first in range(0, world, per_host)]

    def inside(kind: Kind) -> list[Step]:
        calls = tuple(Collective(kind, group, range(world)) for group in groups)
        return [Step(calls, f"{kind.replace('_', '-')} inside hosts")] if per_host > 1 else []

    between = _between(hosts, per_host) if hosts > 1 else []
    return Schedule(name, world, world, tuple(inside("reduce_scatter") + between + inside("all_gather")))


def _between(hosts: int, per_host: int) -> list[Step]:
    """Rank k of every host owns part k, of `hosts` chunks: chunk h of it is summed on host h."""
    encode: list[Op] = []
    sums: list[Op] = []
    decode: list[Op] = []
    there: list[Op] = []
    back: list[Op] = []
    for host in range(hosts):
        for k in range(per_host):
            me, part = host * per_host + k, range(k * hosts, (k + 1) * hosts)
            own = part[host : host + 1]
            encode += [Recode(range(me, me + 1), rest, coded=True) for rest in (part[:host], part[host + 1 :]) if rest]
            sums.append(Recode(range(me, me + 1), own, coded=True))
            decode.append(Recode(range(me, me + 1), part, coded=False))
            for turn in range(1, hosts):  # every rank starts with another peer, so that no port serves all ranks at once
                other = (host + turn) % hosts
                peer = other * per_host + k
                there.append(Move(me, peer, part[other : other + 1], reduce=True, coded=True))
                back.append(Move(me, peer, own, coded=True))
    steps = (
        (encode, "encode"),
        (there, "exchange parts and add"),
        (sums, "encode the sums"),
        (back, "exchange the sums"),
        (decode, "decode"),
    )
    return [Step(tuple(ops), label) for ops, label in steps]
