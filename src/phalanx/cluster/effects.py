"""What would change a plan: each input on its own, doubled, halved or taken away."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from phalanx.schedule import Schedule

from .hosts_differ import typical_slowness
from .machine import Cluster
from .program import compile_schedule
from .question import Candidate, Effect, Question
from .step import predict_step

CLOSE = 1.25  # a rival that takes longer than this times the best does not become the best by one input


def effects_of(question: Question, candidates: tuple[Candidate, ...]) -> Iterator[Effect]:
    """Each input changed on its own; the rivals, the best of the two next families, are priced again, too."""
    best = candidates[0]
    rivals: list[Candidate] = []
    for candidate in candidates[1:]:
        families = {best.algorithm.family, *(rival.algorithm.family for rival in rivals)}
        close = candidate.step is not None and candidate.seconds <= CLOSE * best.seconds
        if close and candidate.algorithm.family not in families and len(rivals) < 2:
            rivals.append(candidate)
    schedules = {
        candidate.algorithm.name: [candidate.algorithm.make(number) for number in range(candidate.algorithm.rounds)]
        for candidate in (best, *rivals)
    }
    for name, change, changed in _changes(question):
        options = {
            candidate.algorithm.name: again(changed, candidate, schedules[candidate.algorithm.name])
            for candidate in (best, *rivals)
        }
        then = min(options, key=options.__getitem__)
        yield Effect(name, change, options[best.algorithm.name] / best.seconds - 1, then)


def again(question: Question, candidate: Candidate, schedules: Sequence[Schedule]) -> float:
    """Seconds of a step in which gradients travel as in `candidate`, for another question."""
    first, *others = (compile_schedule(schedule, question.cluster, question.profile) for schedule in schedules)
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
