"""The plan: the best of {grids x algorithms x group sizes x wires} for a model on a cluster, and why.

Two passes. The first prices every algorithm at a few sizes and combines them as if all ranks waited for each other between
groups; time is convex and nearly linear in the bytes, so the points between are interpolated. The second simulates the best of
each family, and the best of all, rank by rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .candidates import Algorithm, algorithms
from .hosts_differ import HOST_SPREAD, typical_slowness
from .machine import Cluster, ClusterError
from .profile import BackendProfile
from .program import Program, compile_schedule, connections
from .simulate import run
from .step import PredictedStep, StepPlan, Sync, make_groups, packing, predict_step
from .workload import Compute, Model

GROUP_SIZES = (1e6, 4e6, 8e6, 16e6, 25e6, 64e6)  # bytes of float32
SCREENED_SIZES = 7
NO_EFFECT = 0.0005  # of the step: what a table with one decimal cannot show
SIMULATED = 12  # of the best screened candidates, the best of every family besides
TIE = 0.01  # of the step: predictions that differ by less are equal


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be planned: `batch` samples per step over all ranks of `cluster`."""

    cluster: Cluster
    model: Model
    compute: Compute
    profile: BackendProfile
    batch: float
    group_sizes: tuple[float, ...] = GROUP_SIZES
    wires: tuple[int, ...] = (4, 2)
    families: tuple[str, ...] = ("ring", "torus", "hierarchical", "tree", "halving-doubling")
    double_buffering: bool = False
    input: float = 0.0
    host_spread: float = HOST_SPREAD

    @property
    def per_rank(self) -> float:
        return self.batch / self.cluster.ranks


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to communicate, and the step that it leads to."""

    algorithm: Algorithm
    plan: StepPlan
    seconds: float
    step: PredictedStep | None = None  # None: screened only


@dataclass(frozen=True, slots=True)
class Effect:
    """What a changed input does to the step of the chosen plan, and which plan would be chosen then."""

    input: str
    change: str
    relative: float  # of the step time; -0.1 is a tenth less
    best_then: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer. `candidates` are all that were looked at, best first."""

    question: Question
    best: Candidate
    candidates: tuple[Candidate, ...]
    one_device: float  # samples/s of one device alone, with the same batch per rank
    one_host: float  # samples/s of one host alone, with the same batch per rank
    terms: tuple[tuple[str, float], ...]  # parts of the step in seconds; they add up to it
    effects: tuple[Effect, ...]
    warnings: tuple[str, ...]

    @property
    def rate(self) -> float:
        return self.question.batch / self.best.seconds

    @property
    def efficiency_device(self) -> float:
        return self.rate / (self.one_device * self.question.cluster.ranks)

    @property
    def efficiency_host(self) -> float:
        return self.rate / (self.one_host * self.question.cluster.hosts)

    @property
    def error(self) -> float:
        """Relative, two sigma: what the profile left unexplained where it was fitted or tried."""
        return 2 * self.question.profile.residual


def make_plan(question: Question) -> Plan:
    """The best way to communicate, with its reasons."""
    if question.batch < question.cluster.ranks:
        raise ClusterError(
            f"a batch of {question.batch:g} does not give each of {question.cluster.ranks} ranks a sample;"
            " give a larger batch or fewer ranks"
        )
    candidates = rank_candidates(question)
    best = candidates[0]
    effects = tuple(_effects(question, candidates))
    return Plan(
        question,
        best,
        candidates,
        one_device=question.per_rank / (question.compute.seconds(question.per_rank) + question.compute.optimizer),
        one_host=_one_host(question, best),
        terms=_terms(question, best),
        effects=effects,
        warnings=tuple(_warnings(question, best, effects)),
    )


def rank_candidates(question: Question) -> tuple[Candidate, ...]:
    """Every candidate, best first: all screened, the most promising simulated rank by rank."""
    programs: dict[str, tuple[Program, ...]] = {}
    screened: list[Candidate] = []
    for algorithm in algorithms(question.cluster, question.families):
        programs[algorithm.name] = _programs(question, algorithm)
        screened += _screen(question, algorithm, programs[algorithm.name])
    if not screened:
        raise ClusterError(f"none of {', '.join(question.families)} fits {question.cluster.ranks} ranks; allow another algorithm")
    screened.sort(key=lambda candidate: candidate.seconds)
    chosen = screened[:SIMULATED]
    for family in {candidate.algorithm.family for candidate in screened}:
        chosen.append(next(candidate for candidate in screened if candidate.algorithm.family == family))
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
    shared = {name: connections(programs[name][0]) for name in {candidate.algorithm.name for candidate in done}}
    done.insert(0, done.pop(choose([(candidate.seconds, shared[candidate.algorithm.name]) for candidate in done])))
    return (*done, *(candidate for candidate in screened if id(candidate) not in simulated))


def choose(options: Sequence[tuple[float, int]]) -> int:
    """Which of these (seconds, connections of a port) to take: the fastest or, of those that are as fast within `TIE`, the one
    whose ports carry the fewest connections. Messages that share a port are predicted a little too fast."""
    fastest = min(seconds for seconds, _ in options)
    return min((shared, seconds, i) for i, (seconds, shared) in enumerate(options) if seconds <= (1 + TIE) * fastest)[2]


def _programs(question: Question, algorithm: Algorithm) -> tuple[Program, ...]:
    return tuple(
        compile_schedule(algorithm.make(number), question.cluster, question.profile) for number in range(algorithm.rounds)
    )


def _step_plans(question: Question, algorithm: Algorithm) -> Iterator[StepPlan]:
    if algorithm.gossips:
        for wire in question.wires:
            yield StepPlan(wire=wire, sync="gossip", input=question.input)
        return
    sync: Sync = "double buffering" if question.double_buffering else "all-reduce"
    for wire in question.wires:
        for size in question.group_sizes[:1] if question.double_buffering else question.group_sizes:
            yield StepPlan(group_bytes=size, wire=wire, sync=sync, input=question.input)


def _screen(question: Question, algorithm: Algorithm, programs: tuple[Program, ...]) -> Iterator[Candidate]:
    seconds = _interpolated(programs, 2 * 4.0 * question.model.elements)
    slowest = float(typical_slowness(question.cluster, question.host_spread).max())
    work = question.compute.seconds(question.per_rank) * slowest
    forward = work * question.compute.forward
    for plan in _step_plans(question, algorithm):
        if plan.sync == "all-reduce":
            end = packed = 0.0
            for group in make_groups(question.model, plan.group_bytes):
                packed += packing(question.profile, group.elements)
                end = max(end, forward + group.ready * (work - forward) + packed) + seconds(group.elements * plan.wire)
            total = end + question.compute.optimizer
        else:
            copies = plan.copies if plan.sync == "gossip" else 1
            travel = seconds(copies * question.model.elements * plan.wire)
            mixing = 2 * packing(question.profile, copies * question.model.elements)
            total = max(work + question.compute.optimizer, travel) + mixing
        yield Candidate(algorithm, plan, max(total, plan.input))


def _interpolated(programs: tuple[Program, ...], largest: float) -> Callable[[float], float]:
    """Mean seconds of `programs` as a function of bytes, from a few sizes up to `largest`."""
    sizes = np.concatenate(([0.0], np.geomspace(largest / 4**SCREENED_SIZES, largest, SCREENED_SIZES)))
    times = np.mean([[run(program, float(size)).seconds for size in sizes] for program in programs], axis=0)
    return lambda nbytes: float(np.interp(nbytes, sizes, times))


def _one_host(question: Question, best: Candidate) -> float:
    """Samples/s of one host, its own ranks in one all-reduce."""
    host = question.cluster.with_ranks(question.cluster.per_host)
    plan = replace(best.plan, sync="all-reduce") if best.plan.sync == "gossip" else best.plan
    options = []
    for algorithm in algorithms(host, ("ring", "halving-doubling")):
        program = compile_schedule(algorithm.make(0), host, question.profile)
        options.append(predict_step(program, question.model, question.compute, question.per_rank, plan).seconds)
    return question.per_rank * host.ranks / min(options)


def _terms(question: Question, best: Candidate) -> tuple[tuple[str, float], ...]:
    """The step, divided: samples, what does not grow with them, the update, the slowest host, and what communication adds."""
    compute = question.compute
    samples, fixed = question.per_rank * compute.per_sample, compute.fixed
    waiting = best.step.compute - samples - fixed - compute.optimizer if best.step else 0.0
    exposed = best.seconds - samples - fixed - compute.optimizer - waiting
    name = "input" if best.step and best.step.limit == "input" else "communication that nothing hides"
    return (
        ("computing samples", samples),
        ("computing, whatever the batch", fixed),
        ("optimizer", compute.optimizer),
        ("waiting for the slowest host", waiting),
        (name, exposed),
    )


def _effects(question: Question, candidates: tuple[Candidate, ...]) -> Iterator[Effect]:
    """Each input changed on its own; the rivals, the best of the two next families, are priced again, too."""
    best = candidates[0]
    rivals: list[Candidate] = []
    for candidate in candidates[1:]:
        families = {best.algorithm.family, *(rival.algorithm.family for rival in rivals)}
        if candidate.step is not None and candidate.algorithm.family not in families and len(rivals) < 2:
            rivals.append(candidate)
    for name, change, changed in _changes(question):
        options = {candidate.algorithm.name: _again(changed, candidate) for candidate in (best, *rivals)}
        then = min(options, key=options.__getitem__)
        yield Effect(name, change, options[best.algorithm.name] / best.seconds - 1, then)


def _again(question: Question, candidate: Candidate) -> float:
    first, *others = _programs(question, candidate.algorithm)
    slowness = typical_slowness(question.cluster, question.host_spread)
    return predict_step(
        first, question.model, question.compute, question.per_rank, candidate.plan, slowness=slowness, rounds=others
    ).seconds


def _changes(question: Question) -> Iterator[tuple[str, str, Question]]:
    cluster, profile, compute = question.cluster, question.profile, question.compute

    def with_cluster(changed: Cluster) -> Question:
        return replace(question, cluster=changed)

    network, inside = cluster.network, cluster.inside
    if cluster.hosts > 1:
        yield "network bandwidth", "x2", with_cluster(replace(cluster, network=replace(network, bandwidth=2 * network.bandwidth)))
        latency = with_cluster(replace(cluster, network=replace(network, latency=network.latency / 2)))
        yield "network latency", "/2", latency
    if cluster.uplink:
        uplink = replace(cluster.uplink, bandwidth=2 * cluster.uplink.bandwidth)
        yield "uplink bandwidth", "x2", with_cluster(replace(cluster, uplink=uplink))
    if cluster.per_host > 1:
        yield (
            "bandwidth inside hosts",
            "x2",
            with_cluster(replace(cluster, inside=replace(inside, bandwidth=2 * inside.bandwidth))),
        )
        yield "latency inside hosts", "/2", with_cluster(replace(cluster, inside=replace(inside, latency=inside.latency / 2)))
    software = replace(
        profile,
        call=profile.call / 2,
        start=profile.start / 2,
        message=profile.message / 2,
        message_inside=profile.message_inside / 2,
        protocols=tuple(protocol.halved() for protocol in profile.protocols),
    )
    yield "library's time per call and message", "/2", replace(question, profile=software)
    yield "speed of a device", "x2", replace(question, compute=compute.faster(2))
    yield "computing, whatever the batch", "to 0", replace(question, compute=replace(compute, fixed=0.0))
    if cluster.hosts > 1:
        yield "differences between hosts", "to 0", replace(question, host_spread=0.0)
    if question.input:
        yield "time to prepare a batch", "/2", replace(question, input=question.input / 2)


def _warnings(question: Question, best: Candidate, effects: Iterable[Effect]) -> Iterator[str]:
    for effect in effects:
        if abs(effect.relative) < NO_EFFECT:
            yield f"{effect.input} ({effect.change}) has no effect on this plan: less than {NO_EFFECT:.2%} of the step"
    if question.compute.source:
        yield f"computing times: {question.compute.source}"
    if best.algorithm.gossips:
        yield "gossip averages with one partner per step: it is not the same training as an all-reduce"
