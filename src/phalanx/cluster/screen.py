"""Every way to communicate, best first.

There are two passes. The first prices each algorithm at a few sizes and combines them as if all ranks waited for each other
between groups. Time is convex and nearly linear in the bytes, so it interpolates between these sizes. A simulation with queues is
slow, so it skips an algorithm that a bound shows to be hopeless within its family. The second pass simulates the best of each
family, and the best of all, rank by rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from phalanx.schedule.tree import tree_edges

from .candidates import Algorithm, algorithms, flat_rounds
from .hosts_differ import typical_slowness
from .least import crowded, least_of
from .machine import Cluster, ClusterError
from .program import Program, compile_schedule, connections
from .question import Candidate, Question
from .routes import port_of
from .simulate import run
from .step import GradientGroup, StepPlan, Sync, agreeing, beside_backward, exchanged, make_groups, predict_step, price
from .workload import Model

Floats = NDArray[np.float64]
Seconds = Callable[[float], float]  # of an all-reduce, by the bytes of its buffer
SCREENED_SIZES, SCREENED_RANGE = 6, 4**7
SIMULATED = 12  # of the best screened candidates, plus the best of every family
HOPELESS = 1.1  # times as slow as another grid of the family, at every size
TIE = 0.01  # of the step: predictions that differ by less are equal


def rank_candidates(question: Question) -> tuple[Candidate, ...]:
    """Every candidate, best first: all screened, the most promising simulated rank by rank."""
    programs: dict[str, tuple[Program, ...]] = {}
    screened: list[Candidate] = []
    groups = {size: make_groups(question.model, size) for size in question.groups}
    sizes = screened_sizes(question.model)
    for family in families_of((*algorithms(question.cluster, question.families), *question.own)):
        least = least_seconds(question, family[0].family)
        if screened and least is not None:
            fastest = min(candidate.seconds for candidate in screened)
            if all(candidate.seconds > fastest for candidate in _screen(question, family[0], least, groups)):
                continue  # slower than another one, whatever the groups
        made = [programs_of(question, algorithm) for algorithm in family]
        for algorithm, compiled, seconds in zip(family, made, price_family(family, made, sizes)):
            if seconds is None:
                continue
            programs[algorithm.name] = compiled
            screened += _screen(question, algorithm, functools.partial(np.interp, xp=sizes, fp=seconds), groups)
    if not screened:
        raise ClusterError(f"none of {', '.join(question.families)} fits {question.cluster.ranks} ranks; allow another algorithm")
    screened.sort(key=lambda candidate: candidate.seconds)
    chosen = screened[:SIMULATED]
    for name in {candidate.algorithm.family for candidate in screened}:
        chosen.append(next(candidate for candidate in screened if candidate.algorithm.family == name))
    slowness = typical_slowness(question.cluster, question.host_spread)
    simulated: dict[int, Candidate] = {}
    for candidate in chosen:
        if id(candidate) not in simulated:
            first, *others = programs[candidate.algorithm.name]
            step = predict_step(
                first, question.model, question.compute, question.per_rank, candidate.plan, slowness=slowness, rounds=others
            )
            simulated[id(candidate)] = replace(candidate, seconds=step.seconds, step=step)
    done = sorted(simulated.values(), key=lambda candidate: candidate.seconds)
    options = []
    for candidate in done:
        program = programs[candidate.algorithm.name][0]
        calls = len(program.phases) * len(groups.get(candidate.plan.group_bytes, (None,)))
        options.append((candidate.seconds, connections(program), calls))
    done.insert(0, done.pop(choose(options)))
    return (*done, *(candidate for candidate in screened if id(candidate) not in simulated))


def families_of(algorithms: Iterable[Algorithm]) -> list[list[Algorithm]]:
    """Algorithms by family, in the order in which families first appear."""
    found: dict[str, list[Algorithm]] = {}
    for algorithm in algorithms:
        found.setdefault(algorithm.family, []).append(algorithm)
    return list(found.values())


def price_family(
    family: Sequence[Algorithm], made: Sequence[tuple[Program, ...]], sizes: Floats, hopeless: float = HOPELESS
) -> list[Floats | None]:
    """Seconds of an all-reduce, by size, of every algorithm of a family. None means hopeless.

    The most promising ones are priced first. Another one is hopeless if at every size its lower bound is more than `hopeless`
    times the seconds of one that was priced.
    """
    least: dict[int, Floats] = {}
    if len(family) > 1:
        least = {
            i: least_of(made[i][0], sizes) for i, algorithm in enumerate(family) if not algorithm.gossips and crowded(made[i][0])
        }
    seconds: list[Floats | None] = [None] * len(family)
    for i in sorted(range(len(family)), key=lambda i: float(np.log(least[i]).sum()) if i in least else -np.inf):
        if i in least and any(bool((least[i] > hopeless * other).all()) for other in seconds if other is not None):
            continue
        by_program = [[run(program, float(size), most_by_events=0).seconds for size in sizes] for program in made[i]]
        seconds[i] = np.mean(by_program, axis=0)
    return seconds


def choose(options: Sequence[tuple[float, int, int]]) -> int:
    """Which of these (seconds, connections of a port, calls in a step) to take: the simplest within `TIE` of the fastest.
    The simplest has the fewest connections per port, then the fewest calls, which means few groups."""
    fastest = min(seconds for seconds, *_ in options)
    equal = [(shared, calls, seconds, i) for i, (seconds, shared, calls) in enumerate(options) if seconds <= (1 + TIE) * fastest]
    return min(equal)[3]


def programs_of(question: Question, algorithm: Algorithm) -> tuple[Program, ...]:
    """The schedules of `algorithm`, compiled."""
    return tuple(compile_schedule(flat, question.cluster, question.profile) for flat in flat_rounds(algorithm))


def _step_plans(question: Question, algorithm: Algorithm) -> Iterator[StepPlan]:
    if algorithm.gossips:
        for wire in question.wires:
            yield StepPlan(wire=wire, sync="gossip", input=question.input)
        return
    sync: Sync = "double buffering" if question.double_buffering else "all-reduce"
    for wire in question.wires:
        for size in question.groups[-1:] if question.double_buffering else question.groups:
            yield StepPlan(group_bytes=size, wire=wire, sync=sync, input=question.input)


def _screen(
    question: Question, algorithm: Algorithm, seconds: Seconds, groups: dict[float, tuple[GradientGroup, ...]]
) -> Iterator[Candidate]:
    """A candidate for every way to group and send gradients, with a step in which an all-reduce takes `seconds`."""
    slowest = float(typical_slowness(question.cluster, question.host_spread).max())
    work = question.compute.seconds(question.per_rank) * slowest
    forward = work * question.compute.forward
    for plan in _step_plans(question, algorithm):
        if plan.sync == "all-reduce":

            def send(group: GradientGroup, begin: float, wire: int = plan.wire) -> float:
                return begin + float(seconds(group.elements * wire))

            end, computed = beside_backward(
                price(question.profile, question.cluster), groups[plan.group_bytes], forward, work, send
            )
            total = max(end, computed) + question.compute.optimizer
        else:
            nbytes, mixing = exchanged(question.profile, question.model, plan)
            travel = float(seconds(nbytes))
            total = max(work + question.compute.optimizer, travel) + mixing
        total += agreeing(question.profile, question.cluster)
        yield Candidate(algorithm, plan, max(total, plan.input))


def screened_sizes(model: Model) -> Floats:
    """Bytes at which algorithms are priced. Between them, seconds are interpolated."""
    largest = 2 * 4.0 * model.elements
    return np.concatenate(([0.0], np.geomspace(largest / SCREENED_RANGE, largest, SCREENED_SIZES)))


def least_seconds(question: Question, family: str) -> Seconds | None:
    """A lower bound for an all-reduce of this family, if one is easy to find: for messages that a library launches singly.

    Trees, and halving and doubling, need two messages one after the other for every doubling of the ranks. With halving and
    doubling, a host's part of the sum enters and leaves through all of its ports, and its ranks add up inside it.
    """
    cluster, profile = question.cluster, question.profile
    if profile.calls != "always" or family not in ("tree", "halving-doubling"):
        return None
    doublings, doublings_inside = cluster.hosts.bit_length() - 1, cluster.per_host.bit_length() - 1
    launched = doublings * (profile.message + cluster.network.latency)
    launched += doublings_inside * (profile.message_inside + cluster.inside.latency)
    network = cluster.network.bandwidth * profile.network
    if family == "tree":
        busiest = busiest_port_of_trees(cluster)
        half = (1 - 1 / cluster.hosts) / 2  # of the sum passes the root's port, after the launches
        return lambda nbytes: max(2 * launched + half * nbytes / network, busiest * nbytes / network)
    between = (1 - 1 / cluster.hosts) / (network * cluster.ports)
    inside = (1 - 1 / cluster.per_host) / (cluster.inside.bandwidth * profile.inside)
    return lambda nbytes: 2 * (launched + (between + inside) * nbytes)


def busiest_port_of_trees(cluster: Cluster) -> float:
    """How many buffers leave through the busiest port to the network: an edge of a tree carries half of one in each direction."""
    halves = np.zeros(cluster.hosts * cluster.ports)
    for edges in tree_edges(cluster.ranks):
        ends = np.array([(edge.rank, edge.parent) for edge in edges])
        crossing = ends[ends[:, 0] // cluster.per_host != ends[:, 1] // cluster.per_host]
        np.add.at(halves, port_of(cluster, crossing.ravel()), 1)
    return float(halves.max()) / 2
