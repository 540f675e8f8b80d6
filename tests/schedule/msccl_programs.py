"""All-reduces in the XML that msccl-tools emits, written by a small writer of our own: thread blocks per peer and channel, fused
steps, scratch, dependencies as depid and deps with nops for the rest, instances.

Structures after the examples of microsoft/msccl-tools; no code or file of theirs is here.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial

WRITES = {"r": "dst", "rrc": "dst", "rcs": "dst", "rrcs": "dst", "re": "dst", "cpy": "dst"}
READS = {
    "r": [],
    "s": ["src"],
    "rrc": ["dst"],
    "rcs": ["dst"],
    "rrcs": ["dst"],
    "rrs": ["src"],
    "re": ["src", "dst"],
    "cpy": ["src"],
}


@dataclass(eq=False)
class Op:
    """One step of a thread block before it has its place there."""

    kind: str
    src: tuple  # buffer, offset
    dst: tuple
    count: int
    send: int = -1
    recv: int = -1
    chan: int = 0
    needs: list = field(default_factory=list)
    tb: int = -1
    at: int = -1


class Program:
    """Calls in program order, as in MSCCLang: `copy` and `reduce` between ranks, `add` inside one."""

    def __init__(self, name, ranks, chunks):
        self.name, self.ranks, self.chunks = name, ranks, chunks
        self.ops = [[] for _ in range(ranks)]
        self.links = []  # (send, receive) in order

    def copy(self, src, a, dst, b, count=1, chan=0, kind="r"):
        send = Op("s", a, b, count, send=dst, chan=chan)
        receive = Op(kind, a, b, count, recv=src, chan=chan)
        self.ops[src].append(send)
        self.ops[dst].append(receive)
        self.links.append((send, receive))

    def reduce(self, src, dst, place, count=1, chan=0):
        self.copy(src, place, dst, place, count, chan, kind="rrc")

    def add(self, rank, a, b, count=1):
        self.ops[rank].append(Op("re", a, b, count))

    def fuse(self, *, drop=False):
        """A receive whose chunks are sent on at once is one step; `drop`: a sum that is overwritten later is not kept (rrs)."""
        for ops in self.ops:
            out = []
            for op in ops:
                last = next((o for o in reversed(out) if o.kind in ("r", "rrc") and o.dst == op.src and o.chan == op.chan), None)
                between = out[out.index(last) + 1 :] if last else []
                free = (
                    last and not any(_touch(o, op.src, op.count) for o in between) and last.count == op.count and last.send == -1
                )
                free = free and not any((o.send, o.chan) == (op.send, op.chan) for o in between)  # messages keep their order
                if op.kind == "s" and free:
                    last.kind = {"r": "rcs", "rrc": "rrs" if drop else "rrcs"}[last.kind]
                    last.send = op.send
                    if last.kind == "rrs":
                        last.src = last.dst
                    self.links = [(last if a is op else a, b) for a, b in self.links]
                else:
                    out.append(op)
            ops[:] = out
        return self

    def xml(self, instances=1):
        channels = 1 + max((op.chan for ops in self.ops for op in ops), default=0)
        lines = [
            f'<algo name="{self.name}" proto="LL" nchannels="{channels * instances}" nchunksperloop="{self.chunks * instances}"'
            f' ngpus="{self.ranks}" coll="allreduce" inplace="1">'
        ]
        scratch = max((o + op.count for ops in self.ops for op in ops for b, o in (op.src, op.dst) if b == "s"), default=0)
        for rank, ops in enumerate(self.ops):
            copies = []
            for k in range(instances):
                shift = partial(_shift, k=k, chunks=self.chunks, scratch=scratch)
                mine = [Op(o.kind, shift(o.src), shift(o.dst), o.count, o.send, o.recv, o.chan + k * channels) for o in ops]
                copies += mine
            lines += [f'  <gpu id="{rank}" i_chunks="{self.chunks * instances}" o_chunks="0" s_chunks="{scratch * instances}">']
            lines += _gpu(copies)
            lines += ["  </gpu>"]
        return "\n".join([*lines, "</algo>"])


def _shift(place, k, chunks, scratch):
    buffer, offset = place
    return buffer, offset + k * (scratch if buffer == "s" else chunks)


def _touch(op, place, count):
    return any(b == place[0] and o < place[1] + count and place[1] < o + op.count for b, o in (op.src, op.dst))


def _gpu(ops):
    """Thread blocks: one per pair of peers and channel, fused steps with both; local steps in one of their own."""
    blocks = defaultdict(list)
    both = {(o.send, o.recv, o.chan) for o in ops if o.send >= 0 and o.recv >= 0}
    for op in ops:
        fits = [key for key in both if key[2] == op.chan and op.send in (-1, key[0]) and op.recv in (-1, key[1])]
        key = fits[0] if fits and (op.send, op.recv) != (-1, -1) else (op.send, op.recv, op.chan)
        blocks[key].append(op)
    order = sorted(blocks)
    last_write, readers = {}, defaultdict(list)
    for op in ops:
        slots = lambda place: [(place[0], place[1] + i) for i in range(op.count)]  # noqa: E731, B023
        for side in READS[op.kind]:
            for slot in slots(getattr(op, side)):
                op.needs += [last_write[slot]] if slot in last_write else []
                readers[slot].append(op)
        if op.kind in WRITES:
            for slot in slots(op.dst):
                op.needs += [last_write[slot]] if slot in last_write else []
                op.needs += [o for o in readers[slot] if o is not op]
                last_write[slot], readers[slot] = op, []
    for number, key in enumerate(order):
        steps = []
        for op in blocks[key]:
            op.tb = number
            steps.append(op)
        blocks[key] = steps
    placed, rows = {}, defaultdict(list)
    for op in ops:  # program order, so what an op needs has its place already
        waits = {}
        for need in op.needs:
            if need.tb != op.tb:
                tb, at = placed[id(need)]
                waits[tb] = max(at, waits.get(tb, 0))
        waits = sorted(waits.items())
        rows[op.tb] += [(None, wait) for wait in waits[1:]]
        rows[op.tb].append((op, waits[0] if waits else (-1, -1)))
        placed[id(op)] = op.tb, len(rows[op.tb]) - 1
    awaited = {wait for steps in rows.values() for _, wait in steps}
    lines = []
    for number, (send, recv, chan) in enumerate(order):
        lines += [f'    <tb id="{number}" send="{send}" recv="{recv}" chan="{chan}">']
        for at, (op, (depid, deps)) in enumerate(rows[number]):
            tail = f'depid="{depid}" deps="{deps}" hasdep="{int((number, at) in awaited)}"/>'
            if op is None:
                lines += [f'      <step s="{at}" type="nop" srcbuf="i" srcoff="-1" dstbuf="o" dstoff="-1" cnt="0" {tail}']
            else:
                lines += [
                    f'      <step s="{at}" type="{op.kind}" srcbuf="{op.src[0]}" srcoff="{op.src[1]}" dstbuf="{op.dst[0]}"'
                    f' dstoff="{op.dst[1]}" cnt="{op.count}" {tail}'
                ]
        lines += ["    </tb>"]
    return lines


# the algorithms


def _ring_scatter(p, ranks, chunks, chan=lambda c: 0, count=1):
    n = len(ranks)
    for i, c in enumerate(chunks):
        for t in range(n - 1):
            p.reduce(ranks[(i + t + 1) % n], ranks[(i + t + 2) % n], ("i", c), count, chan(i))


def _ring_gather(p, ranks, chunks, chan=lambda c: 0, count=1):
    n = len(ranks)
    for i, c in enumerate(chunks):
        for t in range(n - 1):
            p.copy(ranks[(i + t) % n], ("i", c), ranks[(i + t + 1) % n], ("i", c), count, chan(i))


def ring(n, channels=1):
    p = Program("allreduce_ring", n, n)
    _ring_scatter(p, range(n), range(n), lambda i: i % channels)
    _ring_gather(p, range(n), range(n), lambda i: i % channels)
    return p


def all_pairs(n):
    """Every rank sends chunk r to the scratch of rank r, which adds them up and sends the sum back."""
    p = Program("allreduce_pairs", n, n * n)
    for a in range(n):
        for b in range(n):
            if a != b:
                p.copy(a, ("i", b * n), b, ("s", n * (a if a < b else a - 1)), n)
    for r in range(n):
        for index in range(n * (n - 1)):
            p.add(r, ("s", index), ("i", r * n + index % n))
    for a in range(n):
        for b in range(n):
            if a != b:
                p.copy(a, ("i", a * n), b, ("i", a * n), n)
    return p


def one_step(n):
    """Every rank sends everything to all others, and all add."""
    p = Program("allreduce_1step", n, n)
    for a in range(n):
        for b in range(n):
            if a != b:
                p.copy(a, ("i", 0), b, ("s", n * (a if a < b else a - 1)), n)
    for r in range(n):
        for index in range(n * (n - 1)):
            p.add(r, ("s", index), ("i", index % n))
    return p


def binomial_tree(n, trees=1):
    p = Program("allreduce_binomial_tree", n, trees)
    for t in range(trees):
        rank = (lambda v: v) if t == 0 else (lambda v: n - 1 - v)
        distance = 1
        while distance < n:
            for v in range(0, n - distance, 2 * distance):
                p.reduce(rank(v + distance), rank(v), ("i", t), 1, t)
            distance *= 2
        while distance > 1:
            distance //= 2
            for v in range(0, n - distance, 2 * distance):
                p.copy(rank(v), ("i", t), rank(v + distance), ("i", t), 1, t)
    return p


def halving_doubling(n, nearest_first=True):
    p = Program("allreduce_recursive_doubling_halving", n, n)
    masks = [1 << k for k in range(n.bit_length() - 1)]
    masks = masks if nearest_first else masks[::-1]
    owned = {r: list(range(n)) for r in range(n)}
    history = []
    for mask in masks:
        kept = {r: [c for c in owned[r] if bool(c & mask) == bool(r & mask)] for r in range(n)}
        for r in range(n):  # through scratch: both sides need the old value
            for i, c in enumerate(kept[r ^ mask]):
                p.copy(r, ("i", c), r ^ mask, ("s", i), 1)
        for r in range(n):
            for i, c in enumerate(kept[r]):
                p.add(r, ("s", i), ("i", c))
        history.append((mask, kept))
        owned = kept
    for mask, kept in reversed(history):
        for r in range(n):
            for c in kept[r]:
                p.copy(r, ("i", c), r ^ mask, ("i", c))
    return p


def hierarchical(hosts, per_host, channels=False):
    """Reduce-scatter in each host, all-reduce across, all-gather in each host, all as rings."""
    n = hosts * per_host
    p = Program("hierarchical_allreduce", n, n)
    chan = (lambda k: k) if channels else (lambda k: 0)
    for h in range(hosts):
        for offset in range(hosts):
            _ring_scatter(p, range(h * per_host, (h + 1) * per_host), range(offset, n, hosts), lambda i, o=offset: chan(o))
    for g in range(per_host):
        ranks, chunks = range(g, n, per_host), range(g_chunk(g, per_host) * hosts, g_chunk(g, per_host) * hosts + hosts)
        _ring_scatter(p, ranks, chunks, lambda i, g=g: chan(2 * hosts + g % 2))
        _ring_gather(p, [ranks[(i + 0) % hosts] for i in range(hosts)], chunks, lambda i, g=g: chan(2 * hosts + g % 2))
    for h in range(hosts):
        for offset in range(hosts):
            _ring_gather(p, range(h * per_host, (h + 1) * per_host), range(offset, n, hosts), lambda i, o=offset: chan(hosts + o))
    return p


def g_chunk(g, per_host):
    """The part that a ring scatter leaves at place g: part i ends at place i."""
    return g % per_host


def leaders(hosts, per_host):
    """Star inside a host, ring of leaders: as on machines with one good card."""
    n = hosts * per_host
    p = Program("allreduce_leaders", n, hosts)
    for h in range(hosts):
        for k in range(1, per_host):
            p.reduce(h * per_host + k, h * per_host, ("i", 0), hosts)
    heads = range(0, n, per_host)
    _ring_scatter(p, heads, range(hosts))
    _ring_gather(p, heads, range(hosts))
    for h in range(hosts):
        for k in range(1, per_host):
            p.copy(h * per_host, ("i", 0), h * per_host + k, ("i", 0), hosts)
    return p


def pairs_of_pairs(n):
    """Neighbours first, then all-pairs of the even ranks in scratch, then back."""
    p = Program("allreduce_mi200_pairs", n, n // 2)
    for r in range(0, n, 2):
        p.reduce(r + 1, r, ("i", 0), n // 2)
    evens = list(range(0, n, 2))
    for i, a in enumerate(evens):
        for j, b in enumerate(evens):
            if a != b:
                p.copy(a, ("i", j), b, ("s", i if i < j else i - 1), 1)
    for j, r in enumerate(evens):
        for index in range(len(evens) - 1):
            p.add(r, ("s", index), ("i", j))
    for j, a in enumerate(evens):
        for b in evens:
            if a != b:
                p.copy(a, ("i", j), b, ("i", j), 1)
    for r in range(0, n, 2):
        p.copy(r, ("i", 0), r + 1, ("i", 0), n // 2)
    return p


def programs():
    """The examples: name -> XML."""
    return {
        "ring": ring(4).xml(),
        "ring, fused": ring(8).fuse().xml(),
        "ring, fused, sums not kept": ring(5).fuse(drop=True).xml(),
        "ring of two channels": ring(8, channels=2).fuse().xml(),
        "ring of two channels, three instances": ring(4, channels=2).fuse().xml(instances=3),
        "all pairs": all_pairs(4).xml(),
        "all pairs, two instances": all_pairs(3).xml(instances=2),
        "one step": one_step(4).xml(),
        "binomial tree": binomial_tree(8).xml(),
        "two binomial trees, fused": binomial_tree(5, trees=2).fuse().xml(),
        "recursive halving and doubling": halving_doubling(8).xml(),
        "the farthest first": halving_doubling(8, nearest_first=False).xml(),
        "hierarchical": hierarchical(2, 4).xml(),
        "hierarchical, with channels, fused": hierarchical(2, 3, channels=True).fuse().xml(),
        "leaders": leaders(2, 4).xml(),
        "pairs of pairs": pairs_of_pairs(8).xml(),
    }
