"""Questions that people ask: how many hosts, and which batch, for a training run within a time or within a budget?

It plans every number of hosts (powers of two, then between the two that decide) with every batch that the devices hold and that
published runs have trained with. Epochs grow with the batch, so the largest batch is not always the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from .machine import Cluster
from .question import Candidate, Question
from .screen import rank_candidates
from .training import Training

MOST_HOSTS = 4096  # the end of a search
SMALLEST_SHARE = 16  # samples per device: published runs had no fewer


@dataclass(frozen=True, slots=True)
class Limits:
    """What must not be exceeded: samples per device (its memory), samples per step (what published runs trained with)."""

    per_device: int
    per_step: float
    hosts: int = MOST_HOSTS


@dataclass(frozen=True, slots=True)
class Option:
    """One way to train: the question it answers, the best way to communicate, and the whole run."""

    question: Question
    best: Candidate
    training: Training

    @property
    def device_hours(self) -> float:
        return self.training.hours * self.question.cluster.ranks


Price = Callable[[Question, float], Training]  # the whole run, from the seconds of a step


def batches(cluster: Cluster, limits: Limits) -> Iterator[int]:
    """Samples per step worth trying: the most that devices hold and published runs used, then halves of it."""
    share = min(limits.per_device, int(limits.per_step // cluster.ranks))
    while share >= SMALLEST_SHARE:
        yield share * cluster.ranks
        share //= 2


def fastest(question: Question, cluster: Cluster, limits: Limits, price: Price) -> Option | None:
    """The option whose batch finishes first on `cluster`, or None if there is none."""
    options = []
    for batch in batches(cluster, limits):
        asked = replace(question, cluster=cluster, batch=batch)
        best = rank_candidates(asked)[0]
        options.append(Option(asked, best, price(asked, best.seconds)))
    return min(options, key=lambda option: option.training.hours, default=None)


def search(
    question: Question, limits: Limits, price: Price, fits: Callable[[Option], bool], *, fewest: bool
) -> tuple[Option | None, Sequence[Option]]:
    """The option with the `fewest` hosts that `fits`, or else the fastest that does; and all options that were tried.

    With more hosts, `fits` changes only once: to true (a time) or to false (a budget), as far as published batches allow.
    """
    seen: dict[int, Option] = {}

    def look(hosts: int) -> Option | None:
        if hosts not in seen:
            found = fastest(question, question.cluster.with_ranks(hosts * question.cluster.per_host), limits, price)
            if found is None:
                return None
            seen[hosts] = found
        return seen[hosts]

    good, bad, hosts = None, None, 1
    while hosts <= limits.hosts:
        option = look(hosts)
        if option is None:
            break
        if fits(option):
            good = hosts
            if fewest:
                break
        else:
            bad = hosts
            if not fewest and good is not None:
                break
        hosts *= 2
    while good is not None and bad is not None and abs(good - bad) > max(1, min(good, bad) // 8):
        between = (good + bad) // 2
        option = look(between)
        if option is not None and fits(option):
            good = between
        else:
            bad = between
    chosen = seen[good] if good is not None else None
    if chosen is not None and not fewest:  # the fastest of those that fit
        chosen = min((option for option in seen.values() if fits(option)), key=lambda option: option.training.hours)
    return chosen, sorted(seen.values(), key=lambda option: option.question.cluster.hosts)
