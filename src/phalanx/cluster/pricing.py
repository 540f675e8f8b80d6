"""What a technique costs on a cluster, simulated with the schedules that run: bytes between hosts, and the time of a step.

Groups leave during backward as in step.py. Both ends encode and decode, multiply thin matrices, and take outer steps. If hosts do
this work (`memory` of the profile), it is part of the price. If a device does it, it takes no time here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import inf

import numpy as np
from numpy.typing import NDArray

from phalanx.schedule import Schedule, halving_doubling, hierarchical, quantised, recursive_doubling

from .between_hosts import gossip_of, inside_hosts, leaving
from .evidence import Domain
from .hosts_differ import typical_slowness
from .machine import ClusterError
from .program import Program, compile_schedule
from .question import ALL_REDUCES, Question
from .screen import rank_candidates
from .simulate import run
from .step import GradientGroup, StepPlan, agreeing, beside_backward, make_groups, packing, predict_step, price
from .techniques import Priced, Technique, techniques
from .workload import Model, Tensor

Floats = NDArray[np.float64]
CODES = 2.6e9  # bytes/s of float32 that one core encodes, adds and decodes: benchmarks/codes_speed.py, nearest, AVX2, 2026-11-18
THIN = 6  # passes over all gradients for low-rank ones: add the error, two products, the new error (two), the result
OUTER = 6  # passes of an outer step: copy, difference, the outer optimizer's three, copy back
MOST_MESSAGES = 1 << 20  # of one schedule; making more takes too long
MOST_DIRECT = 1024  # the most ranks with which all-reduces of single ranks are tried


def price_techniques(question: Question, *, every: int, ranks: tuple[int, ...] = (4,)) -> tuple[Priced, ...]:
    """Every technique on the cluster of `question`, float32 first."""
    if question.cluster.hosts < 2:
        raise ClusterError("one host: nothing travels between hosts, so there is nothing to compress")
    if question.double_buffering:
        raise ClusterError("the comparison of techniques overlaps with backward; leave out double buffering")
    if question.batch < question.cluster.ranks:
        raise ClusterError(f"a batch of {question.batch:g} does not give each of {question.cluster.ranks} ranks a sample")
    desk = _Desk(question)
    return tuple(desk.priced(technique) for technique in techniques(every, ranks))


def domain_of(model: Model) -> Domain | None:
    """The domain of a model's data, if it is known."""
    if model.tokens > 1:
        return "text"
    return "images" if model.name.startswith(("resnet", "vgg")) else None


@dataclass(frozen=True, slots=True)
class Thin:
    """One group as low-rank gradients: elements of the first message and of the second, and elements to multiply."""

    first: int
    second: int
    multiplied: int


def thin(tensors: list[Tensor], rank: int) -> Thin:
    """What `phalanx.PowerSGD(rank)` sends for a group: P and the uncompressed tensors, then Q (grad/wires/low_rank.py)."""
    first = second = multiplied = 0
    for tensor in tensors:
        rows, columns = tensor.rows, tensor.elements // max(tensor.rows, 1)
        own = min(rank, rows, columns)
        if own == 0 or 2 * (rows + columns) * own >= rows * columns:
            first += tensor.elements
        else:
            first, second, multiplied = first + rows * own, second + columns * own, multiplied + tensor.elements
    return Thin(first, second, multiplied)


class _Desk:
    """Prices techniques for one question. It simulates once what several of them need."""

    def __init__(self, question: Question) -> None:
        self.question, self.cluster, self.profile = question, question.cluster, question.profile
        compute = question.compute
        self.work = compute.seconds(question.per_rank) * typical_slowness(self.cluster, question.host_spread)
        self.alone = compute.seconds(question.per_rank) + compute.optimizer
        families = tuple(family for family in question.families if family in ALL_REDUCES) or ALL_REDUCES
        self.candidates = {wire: rank_candidates(replace(question, families=families, wires=(wire,)))[0] for wire in (4, 2)}
        self.on_cpu = self.profile.memory < inf
        self.program = cache(self._compiled)
        self.all_reduces = cache(self._all_reduces)
        self.quantised = cache(lambda: quantised(self.cluster.hosts, self.cluster.per_host))

    def priced(self, technique: Technique) -> Priced:
        """The price, or the reason why there is none."""
        prices: dict[str, Callable[[Technique], Priced]] = {
            "all-reduce": self._wire,
            "int8": self._int8,
            "powersgd": self._powersgd,
            "local": self._local,
            "gossip": self._gossip,
        }
        return prices[technique.family](technique)

    def _row(self, technique: Technique, nbytes: float, seconds: float, how: str) -> Priced:
        seconds = max(seconds, self.question.input)
        return Priced(technique, nbytes, seconds, self.alone / seconds, how)

    def _compiled(self, schedule: Schedule, code: float = 1.0) -> Program:
        return compile_schedule(schedule, self.cluster, self.profile, code=code)

    # ---- one exchange per step, during backward ------------------------------------------------------------------------------

    def _step(self, size: float, send: Callable[[GradientGroup, Floats], Floats]) -> float:
        """Seconds of a step with groups of `size` bytes. `send` maps a group's start by rank to its end by rank."""
        groups, compute = make_groups(self.question.model, size), self.question.compute
        priced = price(self.profile, self.cluster)
        came, computed = beside_backward(priced, groups, self.work * compute.forward, self.work, send)
        return float(np.maximum(came, computed).max()) + compute.optimizer + agreeing(self.profile, self.cluster)

    def _fastest(self, send: Callable[[float, GradientGroup, Floats], Floats]) -> tuple[float, float]:
        """The best group size: seconds of a step, and that size."""

        def with_size(size: float) -> float:
            return self._step(size, lambda group, begin: send(size, group, begin))

        return min((with_size(size), size) for size in self.question.groups)

    def _wire(self, technique: Technique) -> Priced:
        best = self.candidates[technique.wire]
        nbytes = leaving(best.algorithm.make(0), self.cluster.per_host) * technique.wire * self.question.model.elements
        return self._row(technique, nbytes, best.seconds, f"{best.algorithm.name}, groups of {best.plan.group_bytes / 1e6:g} MB")

    def _quantised(self, technique: Technique) -> tuple[Schedule, Program] | str:
        """The all-reduce that encodes, or why there is none."""
        hosts, per_host = self.cluster.hosts, self.cluster.per_host
        messages = 2 * per_host * hosts * (hosts - 1)
        if messages > MOST_MESSAGES:
            return f"every host sends to every other: {messages:,} messages are too many to simulate"
        schedule = self.quantised()
        return schedule, self.program(schedule, technique.code)

    def _coding(self, elements: float) -> float:
        """Seconds to encode, add and decode this many numbers between hosts. Every rank does a part of them."""
        return 4 * elements / self.cluster.per_host / CODES if self.on_cpu else 0.0

    def _int8(self, technique: Technique) -> Priced:
        found = self._quantised(technique)
        if isinstance(found, str):
            return Priced(technique, None, None, None, found)
        schedule, program = found

        def send(_: float, group: GradientGroup, begin: Floats) -> Floats:
            return run(program, 4 * group.elements, start=begin).end + self._coding(group.elements)

        seconds, size = self._fastest(send)
        nbytes = leaving(schedule, self.cluster.per_host, technique.code) * 4 * self.question.model.elements
        return self._row(technique, nbytes, seconds, f"{schedule.name}, groups of {size / 1e6:g} MB")

    def _all_reduces(self) -> tuple[tuple[Schedule, Program], ...]:
        """All-reduces for messages of any size: the best for large ones, and those with few steps."""
        hosts, per_host = self.cluster.hosts, self.cluster.per_host
        schedules = [self.candidates[4].algorithm.make(0), hierarchical(hosts, per_host, among=recursive_doubling)]
        if self.cluster.ranks <= MOST_DIRECT:
            schedules += [recursive_doubling(hosts * per_host), halving_doubling(hosts * per_host)]
        return tuple((schedule, self.program(schedule)) for schedule in schedules)

    def _quickest(self, nbytes: float) -> tuple[Schedule, Program]:
        """The all-reduce for a message of this size."""
        return min(self.all_reduces(), key=lambda pair: run(pair[1], nbytes).seconds)

    def _powersgd(self, technique: Technique) -> Priced:
        if all(tensor.rows == 1 for tensor in self.question.model.tensors):
            return Priced(technique, None, None, None, "the model has no shapes; profile it again")
        quickest, per_host = cache(self._quickest), self.cluster.per_host
        left: dict[float, float] = {}

        def send(size: float, group: GradientGroup, begin: Floats) -> Floats:
            own = thin(grouped[group], technique.rank)
            busy = THIN * packing(self.profile, own.multiplied) if self.on_cpu else 0.0
            end = begin + busy
            for elements in (own.first, own.second):
                if elements:
                    schedule, program = quickest(4.0 * elements)
                    end = run(program, 4.0 * elements, start=end).end
                    left[size] = left.get(size, 0.0) + leaving(schedule, per_host) * 4 * elements
            return end

        best: tuple[float, float] | None = None
        for size in self.question.groups:
            grouped = tensors_of_groups(self.question.model, size)
            found = self._step(size, lambda group, begin, size=size: send(size, group, begin)), size  # type: ignore[misc]
            best = found if best is None or found < best else best
        assert best is not None, "there is a size of groups"
        return self._row(technique, left[best[1]], best[0], f"two messages per group of {best[1] / 1e6:g} MB")

    # ---- rarely, or with one partner -----------------------------------------------------------------------------------------

    def _local(self, technique: Technique) -> Priced:
        """Steps inside every host, and once in `every` steps an all-reduce of the parameters, in parts."""
        home = self.program(inside_hosts(self.cluster))

        def at_home(_: float, group: GradientGroup, begin: Floats) -> Floats:
            return run(home, 4 * group.elements, start=begin).end if self.cluster.per_host > 1 else begin

        inner, _ = self._fastest(at_home)
        elements = self.question.model.elements
        part = technique.wire * elements / technique.fragments
        found = self._quickest(part) if technique.code == 1.0 else self._quantised(technique)
        if isinstance(found, str):
            return Priced(technique, None, None, None, found)
        schedule, program = found
        travel = run(program, part).seconds
        if technique.code < 1.0:
            travel += self._coding(elements / technique.fragments)
        busy = OUTER * packing(self.profile, elements) if self.on_cpu else 0.0
        waits = technique.fragments * max(0.0, travel - technique.travels * inner)
        seconds = inner + (waits + busy) / technique.every
        nbytes = leaving(schedule, self.cluster.per_host, technique.code) * technique.wire * elements / technique.every
        return self._row(technique, nbytes, seconds, f"{schedule.name} once in {technique.every} steps")

    def _gossip(self, technique: Technique) -> Priced:
        algorithm, question = gossip_of(self.cluster, exact=technique.exact), self.question
        schedules = [algorithm.make(number) for number in range(algorithm.rounds)]
        first, *others = map(self.program, schedules)
        plan = StepPlan(wire=technique.wire, sync="gossip", input=question.input)
        slowness = typical_slowness(self.cluster, question.host_spread)
        step = predict_step(first, question.model, question.compute, question.per_rank, plan, slowness=slowness, rounds=others)
        per_round = [leaving(schedule, self.cluster.per_host) for schedule in schedules]
        nbytes = sum(per_round) / len(per_round) * plan.copies * plan.wire * question.model.elements
        return self._row(technique, nbytes, step.seconds, f"{algorithm.name}: weights and momentum to one partner")


def tensors_of_groups(model: Model, limit: float) -> dict[GradientGroup, list[Tensor]]:
    """The tensors of every group of `make_groups`, which takes them from the back."""
    left = list(model.tensors)
    found: dict[GradientGroup, list[Tensor]] = {}
    for group in make_groups(model, limit):
        own: list[Tensor] = []
        while left and sum(tensor.elements for tensor in own) < group.elements:
            own.append(left.pop())
        found[group] = own
    return found
