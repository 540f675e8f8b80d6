"""The question that a plan answers, and its answer, as values."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from .candidates import Algorithm
from .chance import Spread
from .hosts_differ import HOST_SPREAD
from .machine import Cluster
from .profile import BackendProfile
from .step import PredictedStep, StepPlan
from .workload import Compute, Model

GROUP_SIZES = (1e6, 4e6, 8e6, 16e6, 25e6, 64e6)  # bytes of float32; also all in one group, unless it is larger than
LARGEST_GROUP = 512e6
ALL_REDUCES = ("ring", "torus", "hierarchical", "tree", "halving-doubling")
NO_EFFECT = 0.0005  # of the step: what a table with one decimal cannot show
OVERLAP_DOUBT = 0.3  # uncertainty of `steals` that published choices leave: 0.3 to 0.9 of the device
NETWORK_DOUBT = 0.15  # of the time of a collective, as nccl-tests differ between clusters of one kind


@dataclass(frozen=True, slots=True)
class Question:
    """What to plan: `batch` samples per step over all ranks of `cluster`."""

    cluster: Cluster
    model: Model
    compute: Compute
    profile: BackendProfile
    batch: float
    group_sizes: tuple[float, ...] = GROUP_SIZES
    wires: tuple[int, ...] = (4, 2)
    families: tuple[str, ...] = ALL_REDUCES
    double_buffering: bool = False
    input: float = 0.0
    host_spread: float = HOST_SPREAD
    own: tuple[Algorithm, ...] = ()  # schedules of the user, in addition to those of `families`

    @property
    def per_rank(self) -> float:
        return self.batch / self.cluster.ranks

    @property
    def groups(self) -> tuple[float, ...]:
        """Sizes of groups to try, in bytes of float32: the given ones, or the usual ones and all in one."""
        whole = 4.0 * self.model.elements
        if self.group_sizes != GROUP_SIZES or whole > LARGEST_GROUP:
            return self.group_sizes
        return (*(size for size in GROUP_SIZES if size < whole), whole)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to communicate, and the step that it leads to."""

    algorithm: Algorithm
    plan: StepPlan
    seconds: float
    step: PredictedStep | None = None  # None: screened only


@dataclass(frozen=True, slots=True)
class Effect:
    """What a changed input does to the step of the chosen plan, and which plan would then be best."""

    input: str
    change: str
    relative: float  # of the step time; -0.1 is a tenth less
    best_then: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer. `candidates` are all that were tried, best first."""

    question: Question
    best: Candidate
    candidates: tuple[Candidate, ...]
    one_device: float  # samples/s of one device alone, with the same batch per rank
    one_host: float  # samples/s of one host alone, with the same batch per rank
    terms: tuple[tuple[str, float], ...]  # parts of the step in seconds; they add up to it
    effects: tuple[Effect, ...]
    warnings: tuple[str, ...]
    spread: Spread | None = None  # with ranks that are slow by chance

    @property
    def seconds(self) -> float:
        """Mean seconds of a step. Chance makes no step faster."""
        return max(self.best.seconds, self.spread.mean) if self.spread else self.best.seconds

    @property
    def rate(self) -> float:
        return self.question.batch / self.seconds

    @property
    def efficiency_device(self) -> float:
        return self.rate / (self.one_device * self.question.cluster.ranks)

    @property
    def efficiency_host(self) -> float:
        return self.rate / (self.one_host * self.question.cluster.hosts)

    @property
    def error(self) -> float:
        """Relative error of this configuration, two sigma: what the profile left unexplained where it was fitted or tried, plus
        the parts of the step that depend on overlap and on a network that was not measured."""
        return uncertainty(self.question, self.best)


def uncertainty(question: Question, candidate: Candidate) -> float:
    """Relative error of the step of `candidate`, two sigma."""
    profile, step = question.profile, candidate.step
    if step is None or profile.steals == 0:  # calibrated, or wide enough
        return 2 * profile.residual
    exposed = min(step.exposed, step.communication)
    overlap, network = (step.communication - exposed) / candidate.seconds, exposed / candidate.seconds
    return 2 * sqrt(profile.residual**2 + (OVERLAP_DOUBT * overlap) ** 2 + (NETWORK_DOUBT * network) ** 2)
