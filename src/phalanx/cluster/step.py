"""A whole training step on every rank: forward, backward, groups of gradients that leave during backward, the update.

Groups leave in order, each when its last gradient is ready and the previous group is back, as in `phalanx.grad`. While one is in
flight, backward slows down by the share that the backend takes of a device. Gossip sends the whole state once per step, during
the computation. Double buffering uses the gradients of the previous step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, repeat
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from .machine import Cluster
from .profile import BackendProfile
from .program import Program
from .rounds import Ports
from .simulate import Timeline, run
from .workload import Compute, Model

Floats = NDArray[np.float64]
MIXING = 4  # passes of gossip over what it exchanges, each as long as packing: pack; take the difference and add it (1.5 each)
LAPS = 2  # through all rounds of gossip: in the first, all start together; the last counts
Sync = Literal["all-reduce", "double buffering", "gossip", "after backward"]


@dataclass(frozen=True, slots=True)
class GradientGroup:
    """Gradients that travel together: their elements, and the part of backward after which all of them are ready."""

    elements: int
    ready: float


@dataclass(frozen=True, slots=True)
class StepPlan:
    """How gradients are sent: `groups` of at most `group_bytes` (as they are computed, in float32), `wire` bytes per element.

    `sync`: "all-reduce" overlaps with backward, "after backward" does not. "gossip" exchanges `copies` of the parameters
    (weights and momentum) with one partner.
    """

    group_bytes: float = 25e6
    wire: int = 4
    sync: Sync = "all-reduce"
    copies: int = 2
    input: float = 0.0  # s to prepare a batch, in parallel with the step


@dataclass(frozen=True, slots=True)
class PredictedStep:
    """A step, by rank: when backward ended, when every group began and ended, when the update was done, since its own start."""

    seconds: float
    compute: float  # forward, backward and update of the slowest rank: what a step would take alone
    communication: float  # the sum of all groups' times, had they run alone
    slower: float  # what communication during backward added to the computing of the slowest rank
    forward_end: Floats
    backward_end: Floats
    groups: tuple[Timeline, ...]
    limit: str  # what decided: "compute", "communication" or "input"

    @property
    def exposed(self) -> float:
        """Seconds that ranks wait for each other: what communication, and waiting for the slowest, add to computing."""
        return max(0.0, self.seconds - self.compute)


def make_groups(model: Model, limit: float) -> tuple[GradientGroup, ...]:
    """Runs of tensors from the back of `model`, of at most `limit` bytes of float32; a larger tensor is a group by itself."""
    if limit <= 0:
        raise ValueError(f"groups of {limit} bytes; give more than 0")
    groups: list[GradientGroup] = []
    elements, done = 0, 0.0
    total = sum(tensor.work for tensor in model.tensors) or 1.0
    for tensor in reversed(model.tensors):
        if elements and 4 * (elements + tensor.elements) > limit:
            groups.append(GradientGroup(elements, done / total))
            elements = 0
        elements += tensor.elements
        done += tensor.work
    return (*groups, GradientGroup(elements, 1.0))


def predict_step(
    program: Program,
    model: Model,
    compute: Compute,
    batch: float,
    plan: StepPlan,
    *,
    slowness: Floats | None = None,
    rounds: Sequence[Program] = (),
) -> PredictedStep:
    """One step with `batch` samples per rank; `slowness` multiplies the computing time of each rank.

    `rounds` are further programs that take turns with `program` from step to step, as in gossip. The result is then the mean,
    after late ranks have made others late.
    """
    work = compute.seconds(batch) * (np.ones(program.cluster.ranks) if slowness is None else slowness)
    forward_end, backward_end = work * compute.forward, work
    if plan.sync == "all-reduce":
        timelines, backward_end = _overlapped(program, make_groups(model, plan.group_bytes), plan, forward_end, backward_end)
        seconds = float(np.maximum(timelines[-1].end, backward_end).max()) + compute.optimizer
    elif plan.sync == "after backward":
        packed = backward_end + packing(program.profile, model.elements)
        timelines = (run(program, model.elements * plan.wire, start=packed),)
        seconds = float(timelines[-1].end.max()) + compute.optimizer
    else:
        nbytes, mixing = exchanged(program.profile, model, plan)
        timelines = (run(program, nbytes),)
        programs = (program, *rounds)
        works = repeat(work + compute.optimizer, LAPS * len(programs))
        ends = [float(clock.max()) for clock in gossip_clocks(programs, nbytes, works, mixing)]
        seconds = (ends[-1] - ends[-1 - len(programs)]) / len(programs)
    seconds += agreeing(program.profile, program.cluster)
    busy = float(work.max()) + compute.optimizer
    communication = float(sum(timeline.end.max() - timeline.begin.max() for timeline in timelines))
    limit = "compute" if seconds <= 1.05 * busy else "communication"
    if plan.input > seconds:
        seconds, limit = plan.input, "input"
    slower = float(backward_end.max() - work.max())
    return PredictedStep(seconds, busy, communication, slower, forward_end, backward_end, timelines, limit)


def packing(profile: BackendProfile, elements: int) -> float:
    """Seconds to copy this many float32 gradients to the send buffer."""
    return 4 * elements / profile.memory


def price(profile: BackendProfile, cluster: Cluster) -> BackendProfile:
    """`profile` for ranks of this cluster: a single rank sends nothing."""
    return profile if cluster.ranks > 1 else replace(profile, steals=0.0, group=0.0, agree=0.0)


def agreeing(profile: BackendProfile, cluster: Cluster) -> float:
    """Seconds that every step costs if there are other hosts."""
    return profile.agree if cluster.hosts > 1 else 0.0


def exchanged(profile: BackendProfile, model: Model, plan: StepPlan) -> tuple[float, float]:
    """What is exchanged during a step: its bytes, and the seconds to pack them and to mix in what arrives."""
    copies, passes = (plan.copies, MIXING) if plan.sync == "gossip" else (1, 1)
    return model.elements * plan.wire * copies, passes * packing(profile, model.elements * copies)


def gossip_clocks(rounds: Sequence[Program], nbytes: float, works: Iterable[Floats], mixing: float) -> Iterator[Floats]:
    """For each step, when each rank ends it. `works` is how long ranks compute, and `rounds` take turns.

    An exchange leaves at the end of a step and must arrive by the end of the next. A rank waits only for its partner, but a late
    rank makes its partners late, and they make theirs late.
    """
    clock = np.zeros(rounds[0].cluster.ranks)
    ports: Ports = {}
    for program, work in zip(cycle(rounds), works):
        landed = run(program, nbytes, start=clock, ports=ports).end
        clock = np.maximum(clock + work, landed) + mixing
        yield clock


def _overlapped(
    program: Program, groups: tuple[GradientGroup, ...], plan: StepPlan, forward_end: Floats, backward_end: Floats
) -> tuple[tuple[Timeline, ...], Floats]:
    timelines: list[Timeline] = []
    rerun = _remembered(program)

    def send(group: GradientGroup, begin: Floats) -> Floats:
        timelines.append(rerun(group.elements * plan.wire, begin))
        return timelines[-1].end

    _, backward_end = beside_backward(price(program.profile, program.cluster), groups, forward_end, backward_end, send)
    return tuple(timelines), backward_end


Times = TypeVar("Times", float, Floats)  # of one rank, or by rank


def beside_backward(
    profile: BackendProfile,
    groups: Sequence[GradientGroup],
    forward_end: Times,
    backward_end: Times,
    send: Callable[[GradientGroup, Times], Times],
) -> tuple[Times, Times]:
    """When the last group is back, and when backward ends, which groups delay. `send` returns when a group is back."""
    came, computed, late = 0.0 * backward_end, backward_end, 0.0 * backward_end
    packed = 0.0
    for group in groups:
        packed += packing(profile, group.elements)
        ready = forward_end + group.ready * (backward_end - forward_end) + late + packed
        begin = np.maximum(ready, came)
        came = send(group, begin)
        # meanwhile, computing is slower: until it is done, or the group is back
        beside = np.minimum(came - begin, np.maximum(computed - begin, 0.0) / (1 - profile.steals))
        lost = profile.steals * beside + profile.group
        computed, late = computed + lost, late + lost
    return came, computed


def _remembered(program: Program) -> Callable[[float, Floats], Timeline]:
    """`run` that remembers results: the same bytes, begun later by a constant on all ranks, end later by that constant."""
    known: dict[float, Timeline] = {}

    def rerun(nbytes: float, start: Floats) -> Timeline:
        before = known.get(nbytes)
        if before is not None:
            later = start - before.begin
            if np.ptp(later) <= 1e-12 * max(1.0, float(start.max())):
                return Timeline(before.name, before.labels, before.clocks + later[0], before.messages)
        known[nbytes] = run(program, nbytes, start=start)
        return known[nbytes]

    return rerun
