"""Synthesis: an all-reduce for any fabric, as spanning trees that share its links fairly, and the bound that no algorithm beats.

Each chunk of the buffer is added up along a spanning tree to its root, and copied back along the same tree. The trees are
chosen one by one: links that are loaded already are long, and the next tree is the shortest. Then each is removed and chosen
again, a few times. Paper: Zhao et al., "ForestColl: Efficient Collective Communications on Heterogeneous Network Fabrics",
arXiv 2402.06787, whose optimal forests come from network flows; these are found by prices (Garg and Könemann, FOCS 1998),
within a few percent.

The bound: before the first rank knows the sum of a byte, messages must have joined all ranks, which takes a spanning tree.
Afterwards the sum must reach all others, which takes another. So for any lengths of the links, no algorithm can beat the
buffer's size times twice the shortest tree, divided by the sum of rate times length. The prices of the search are good
lengths."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.cluster.fabric import Fabric
from phalanx.cluster.fabric_links import FabricError
from phalanx.schedule import Move, Schedule, Step, lower
from phalanx.schedule.ops import joined

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
STEEP = 24.0  # how much longer the busiest link is than an idle one: e^24
TIES, CROWD, BRANCHES = 1e-3, 1.5, 3
AGAIN = 4  # times that every tree is chosen again
Tree = tuple[tuple[int, int], ...]  # pairs of ranks


@dataclass(frozen=True, slots=True)
class Network:
    """A fabric as arrays: the route of every pair of ranks as numbers of links, and the rate of every link in bytes/s."""

    fabric: Fabric
    rates: Floats
    ways: Ints  # (ranks, ranks, hops): numbers of links, padded with the number of a link that costs nothing
    ends: tuple[tuple[int, int], ...]  # of every link, as numbers of nodes; ranks come first
    nodes: int


def route(fabric: Fabric) -> Network:
    """The fewest hops between every two ranks; among routes of equal length, the one with the widest bottleneck."""
    numbers: dict[int | str, int] = {rank: rank for rank in range(fabric.ranks)}
    numbers |= {name: fabric.ranks + i for i, name in enumerate(fabric.switches)}
    ends = tuple((numbers[a], numbers[b]) for a, b, _ in fabric.links)
    rates = np.array([rate * 1e9 for *_, rate in fabric.links])
    leaving: dict[int, list[int]] = defaultdict(list)
    for link, (a, _) in enumerate(ends):
        leaving[a].append(link)
    found = [_ways_from(rank, leaving, ends, rates, fabric) for rank in range(fabric.ranks)]
    hops = max(len(way) for row in found for way in row) if fabric.ranks > 1 else 1
    ways = np.full((fabric.ranks, fabric.ranks, hops), len(ends))
    for a, row in enumerate(found):
        for b, way in enumerate(row):
            ways[a, b, : len(way)] = way
    return Network(fabric, rates, ways, ends, len(numbers))


def _ways_from(
    rank: int, leaving: dict[int, list[int]], ends: tuple[tuple[int, int], ...], rates: Floats, fabric: Fabric
) -> list[list[int]]:
    """Routes from one rank to all. They pass through another rank only if there is no other way."""
    best: dict[int, tuple[int, float, list[int]]] = {rank: (0, float("inf"), [])}
    todo = deque([rank])
    while todo:
        node = todo.popleft()
        hops, width, way = best[node]
        for link in leaving[node]:
            other = ends[link][1]
            through = hops + 1 + (1000 if node != rank and node < fabric.ranks else 0)
            offer = (through, min(width, float(rates[link])), [*way, link])
            if other not in best or (offer[0], -offer[1]) < (best[other][0], -best[other][1]):
                best[other] = offer
                todo.append(other)
    lost = next((other for other in range(fabric.ranks) if other not in best), None)
    if lost is not None:
        raise FabricError(f"{fabric.name}: no way from rank {rank} to rank {lost}")
    return [best[other][2] for other in range(fabric.ranks)]


def _lengths(network: Network, price: Floats) -> Floats:
    """The distance between every two ranks, both ways together."""
    one_way: Floats = np.append(price, 0.0)[network.ways].sum(axis=2)
    return np.asarray(one_way + one_way.T)


def _shortest_tree(lengths: Floats, crowd: float = 1.0) -> Tree:
    """Prim's algorithm on a full matrix. With `crowd`, further edges of a rank that has BRANCHES are longer by that factor."""
    n = len(lengths)
    weights = lengths if crowd == 1.0 else lengths.copy()
    near, parent = weights[0].copy(), np.zeros(n, dtype=np.int64)
    near[0] = np.inf
    outside = np.ones(n, dtype=bool)
    outside[0] = False
    edges, degree = [], [0] * n
    for _ in range(n - 1):
        new = int(near.argmin())
        old = int(parent[new])
        edges.append((old, new))
        outside[new], near[new] = False, np.inf
        degree[old] += 1
        degree[new] += 1
        if crowd != 1.0 and degree[old] >= BRANCHES:
            weights[old] *= crowd
            worse = np.flatnonzero((parent == old) & outside)
            if worse.size:
                inside = np.flatnonzero(~outside)
                again = weights[np.ix_(inside, worse)]
                near[worse], parent[worse] = again.min(axis=0), inside[again.argmin(axis=0)]
        closer = (weights[new] < near) & outside
        near[closer], parent[closer] = weights[new][closer], new
    return tuple(edges)


@dataclass(frozen=True, slots=True)
class Synthesis:
    """A schedule for a fabric, the seconds per byte of its busiest link, and the bound."""

    schedule: Schedule
    seconds_per_byte: float
    bound: float


def synthesise(fabric: Fabric, *, trees: int | None = None, pipeline: int = 1) -> Synthesis:
    """The best forest found for `fabric`.

    There are `trees` chunks, each with its own tree. Each is cut into `pipeline` parts that follow one another.
    """
    network = route(fabric)
    n = fabric.ranks
    count = trees or (64 if n > 64 else max(8, min(96, 2 * n * (n - 1))))
    if n == 1:
        return Synthesis(Schedule(f"synth({fabric.name})", 1, 1, ()), 0.0, 0.0)
    ties = _ties(n)
    load = np.zeros(len(network.rates))  # seconds per byte of the buffer
    bound, chosen = 0.0, []

    def usage(tree: Tree) -> Floats:
        return np.asarray(_load(network, tree) / network.rates / count)

    def choose() -> Tree:
        peak = max(load.max(), 1e-30)
        return _shortest_tree(_lengths(network, np.exp(STEEP * (load / peak - 1)) / network.rates) * next(ties), CROWD)

    for _ in range(count):
        tree = choose()
        load += usage(tree)
        chosen.append(tree)
    best, kept = load.max(), list(chosen)
    for _ in range(AGAIN):
        for i, old in enumerate(chosen):
            load -= usage(old)
            chosen[i] = choose()
            load += usage(chosen[i])
        for steep in (STEEP, STEEP / 4, STEEP / 12):
            bound = max(bound, _bound(network, np.exp(steep * (load / load.max() - 1)) / network.rates))
        if load.max() < best:
            best, kept = load.max(), list(chosen)
    bound = max(bound, _bound(network, 1 / network.rates), *(_bound(network, price) for price in _cut_prices(network)))
    return Synthesis(_to_schedule(fabric, kept, pipeline), float(best), float(bound))


def _ties(n: int) -> Iterator[Floats]:
    """Factors close to 1 that decide between equal trees. Without them, the first is a star, whose middle does all the work."""
    rng = np.random.default_rng(0)
    while True:
        noise = rng.random((n, n)) * TIES
        yield 1 + noise + noise.T


def _load(network: Network, tree: Tree) -> Floats:
    """How often each link is used by a tree, up and down."""
    pairs = np.array(tree)
    links = np.concatenate([network.ways[pairs[:, 0], pairs[:, 1]].ravel(), network.ways[pairs[:, 1], pairs[:, 0]].ravel()])
    return np.bincount(links, minlength=len(network.rates) + 1)[:-1].astype(np.float64)


def _bound(network: Network, price: Floats) -> float:
    """Seconds per byte that no algorithm beats, by these lengths of the links; any route is allowed, not only ours."""
    apart = np.full((network.nodes, network.nodes), np.inf)
    np.fill_diagonal(apart, 0.0)
    for (a, b), length in zip(network.ends, price, strict=True):
        apart[a, b] = min(apart[a, b], length)
    for k in range(network.nodes):
        np.minimum(apart, apart[:, k, None] + apart[None, k, :], out=apart)
    n = network.fabric.ranks
    ranks = apart[:n, :n]
    both = np.minimum(ranks, ranks.T)  # a tree towards the root and one away from it: each at least as long as this one
    tree = sum(float(both[a, b]) for a, b in _shortest_tree(both))
    return 2 * tree / float((network.rates * price).sum())


def _cut_prices(network: Network) -> list[Floats]:
    """Lengths that count what leaves groups of nodes: the parts of the fabric that links above some rate connect."""
    prices = []
    for least in sorted(set(network.rates.tolist())):
        group = np.arange(network.nodes)
        for link, (a, b) in enumerate(network.ends):
            if network.rates[link] > least and group[a] != group[b]:
                group[group == group[a]] = group[b]
        owners = set(group[: network.fabric.ranks].tolist())
        crossing = np.array([group[a] != group[b] for a, b in network.ends])
        leaving = crossing & np.array([group[a] in owners for a, _ in network.ends])  # not what leaves switches alone
        prices += [price.astype(np.float64) for price in (crossing, leaving) if price.any()]
    return prices


def _to_schedule(fabric: Fabric, trees: list[Tree], pipeline: int) -> Schedule:
    """Every chunk up its tree and down again, as early as possible. Messages of one pair in one step are sent together."""
    steps: dict[int, dict[tuple[int, int, bool], list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, tree in enumerate(trees):
        root, children = _rooted(tree, fabric.ranks)
        height = _heights(root, children)
        top = height[root]
        for part in range(pipeline):
            chunk = part * len(trees) + number  # what is sent together is adjacent
            todo = [(root, 0)]
            while todo:
                node, depth = todo.pop()
                for child in children[node]:
                    steps[part + height[child]][child, node, True].append(chunk)
                    steps[part + top + depth][node, child, False].append(chunk)
                    todo.append((child, depth + 1))
    made = tuple(
        Step(tuple(Move(src, dst, joined(chunks), reduce) for (src, dst, reduce), chunks in sorted(steps[t].items())))
        for t in sorted(steps)
    )
    return Schedule(f"synth({fabric.name})", fabric.ranks, len(trees) * pipeline, made)


def _rooted(tree: Tree, n: int) -> tuple[int, list[list[int]]]:
    """The tree from its middle, so that its height is the smallest."""
    near: list[list[int]] = [[] for _ in range(n)]
    for a, b in tree:
        near[a].append(b)
        near[b].append(a)
    order, parent = _walk(0, near)
    order, parent = _walk(order[-1], near)
    path = [order[-1]]
    while parent[path[-1]] != path[-1]:
        path.append(parent[path[-1]])
    root = path[len(path) // 2]
    _, parent = _walk(root, near)
    children: list[list[int]] = [[] for _ in range(n)]
    for node, above in enumerate(parent):
        if node != above:
            children[above].append(node)
    return root, children


def _walk(first: int, near: list[list[int]]) -> tuple[list[int], list[int]]:
    parent = [-1] * len(near)
    parent[first] = first
    order = [first]
    for node in order:
        for other in near[node]:
            if parent[other] < 0:
                parent[other] = node
                order.append(other)
    return order, parent


def _heights(root: int, children: list[list[int]]) -> list[int]:
    height = [0] * len(children)
    order = [root]
    for node in order:
        order += children[node]
    for node in reversed(order):
        height[node] = max((height[child] + 1 for child in children[node]), default=0)
    return height


def busiest_link(s: Schedule, fabric: Fabric) -> float:
    """Seconds per byte of the buffer that the busiest link of `fabric` needs for `s`, on the paths of `route`."""
    network = route(fabric)
    moves = [op for op in lower(s).ops() if isinstance(op, Move)]
    if not moves:
        return 0.0
    links = network.ways[[op.src for op in moves], [op.dst for op in moves]]
    parts = np.repeat(np.array([op.count for op in moves]) / s.chunks, links.shape[1])
    load = np.bincount(links.ravel(), weights=parts, minlength=len(network.rates) + 1)[:-1]
    return float((load / network.rates).max())
