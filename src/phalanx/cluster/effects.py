"""What would change a plan: each input on its own, doubled, halved or removed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from .candidates import flat_rounds
from .hosts_differ import typical_slowness
from .profile import BackendProfile
from .program import Program, compile_schedule
from .question import Candidate, Effect, Question
from .step import predict_step

CLOSE = 1.25  # a rival that takes more than this times the best will not win through one input


def effects_of(question: Question, candidates: tuple[Candidate, ...]) -> Iterator[Effect]:
    """Each input changed on its own. The rivals (the best of the two next families) are priced again, too."""
    best = candidates[0]
    rivals: list[Candidate] = []
    for candidate in candidates[1:]:
        families = {best.algorithm.family, *(rival.algorithm.family for rival in rivals)}
        close = candidate.step is not None and candidate.seconds <= CLOSE * best.seconds
        if close and candidate.algorithm.family not in families and len(rivals) < 2:
            rivals.append(candidate)
    flats = {candidate.algorithm.name: flat_rounds(candidate.algorithm) for candidate in (best, *rivals)}
    compiled: dict[str, Sequence[Program]] = {}
    before = question
    for name, change, then in _changes(question):
        if (then.cluster, then.profile) != (before.cluster, before.profile):
            compiled = {}
        before, options = then, {}
        for candidate in (best, *rivals):
            own = candidate.algorithm.name
            if own not in compiled:
                compiled[own] = [compile_schedule(flat, then.cluster, then.profile) for flat in flats[own]]
            options[own] = again(then, candidate, compiled[own])
        yield Effect(name, change, options[best.algorithm.name] / best.seconds - 1, min(options, key=options.__getitem__))


def again(question: Question, candidate: Candidate, programs: Sequence[Program]) -> float:
    """Seconds of a step that communicates as `candidate` does, for another question."""
    first, *others = programs
    slowness = typical_slowness(question.cluster, question.host_spread)
    return predict_step(
        first, question.model, question.compute, question.per_rank, candidate.plan, slowness=slowness, rounds=others
    ).seconds


INPUTS = ("network", "latency", "uplink", "inside", "inside-latency", "library", "device", "fixed", "hosts", "input")
NAMES = {
    "network": "network bandwidth",
    "latency": "network latency",
    "uplink": "uplink bandwidth",
    "inside": "bandwidth inside hosts",
    "inside-latency": "latency inside hosts",
    "library": "library's time per call and message",
    "device": "speed of a device",
    "fixed": "computing, whatever the batch",
    "hosts": "differences between hosts",
    "input": "time to prepare a batch",
}


def changed(question: Question, what: str, factor: float) -> Question:
    """`question` with one of `INPUTS` multiplied by `factor`; ValueError for any other."""
    cluster, compute = question.cluster, question.compute
    network, inside, uplink = cluster.network, cluster.inside, cluster.uplink

    def with_cluster(**changes: Any) -> Question:
        return replace(question, cluster=replace(cluster, **changes))

    if what == "network":
        return with_cluster(network=replace(network, bandwidth=factor * network.bandwidth))
    if what == "latency":
        return with_cluster(network=replace(network, latency=factor * network.latency))
    if what == "uplink":
        if uplink is None:
            raise ValueError(f"cluster {cluster.name} has no uplink to change; give one of {', '.join(INPUTS)}")
        return with_cluster(uplink=replace(uplink, bandwidth=factor * uplink.bandwidth))
    if what == "inside":
        return with_cluster(inside=replace(inside, bandwidth=factor * inside.bandwidth))
    if what == "inside-latency":
        return with_cluster(inside=replace(inside, latency=factor * inside.latency))
    if what == "library":
        return replace(question, profile=slower_library(question.profile, factor))
    if what == "device":
        return replace(question, compute=compute.faster(factor))
    if what == "fixed":
        return replace(question, compute=replace(compute, fixed=factor * compute.fixed))
    if what == "hosts":
        return replace(question, host_spread=factor * question.host_spread)
    if what == "input":
        return replace(question, input=factor * question.input)
    raise ValueError(f"{what!r} is not an input of a plan; give one of {', '.join(INPUTS)}")


def slower_library(profile: BackendProfile, factor: float) -> BackendProfile:
    """`profile` with calls and messages that take `factor` times as long. The time on the wires stays the same."""
    names = ("call", "start", "message", "message_inside", "group", "agree")
    times: dict[str, Any] = {name: factor * getattr(profile, name) for name in names}
    return replace(profile, **times, protocols=tuple(protocol.slower(factor) for protocol in profile.protocols))


def _changes(question: Question) -> Iterator[tuple[str, str, Question]]:
    """Each input of this question, changed for the better."""
    cluster = question.cluster
    tried: list[tuple[str, str, float]] = []
    if cluster.hosts > 1:
        tried += [("network", "x2", 2.0), ("latency", "/2", 0.5)]
    if cluster.uplink:
        tried.append(("uplink", "x2", 2.0))
    if cluster.per_host > 1:
        tried += [("inside", "x2", 2.0), ("inside-latency", "/2", 0.5)]
    tried += [("library", "/2", 0.5), ("device", "x2", 2.0), ("fixed", "to 0", 0.0)]
    if cluster.hosts > 1:
        tried.append(("hosts", "to 0", 0.0))
    if question.input:
        tried.append(("input", "/2", 0.5))
    for what, change, factor in tried:
        yield NAMES[what], change, changed(question, what, factor)
