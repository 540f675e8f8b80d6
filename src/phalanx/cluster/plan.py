"""The plan: the best of {grids x algorithms x group sizes x wires} for a model on a cluster, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from .candidates import algorithms
from .effects import effects_of
from .machine import ClusterError
from .program import compile_schedule
from .question import NO_EFFECT, Candidate, Effect, Plan, Question
from .screen import rank_candidates
from .step import agreeing, predict_step

LOCAL_STEPS = 50  # of the note about local steps: they send next to nothing then
LOCAL_PAYS = 0.1  # share of a step spent waiting, from which local steps are worth a note


def make_plan(question: Question) -> Plan:
    """The best way to communicate, with its reasons."""
    if question.batch < question.cluster.ranks:
        raise ClusterError(
            f"a batch of {question.batch:g} does not give each of {question.cluster.ranks} ranks a sample;"
            " give a larger batch or fewer ranks"
        )
    candidates = rank_candidates(question)
    best = candidates[0]
    effects = tuple(effects_of(question, candidates))
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
    """The parts of the step: samples, what does not grow with them, the update, the slowest host, and what communication adds."""
    compute = question.compute
    samples, fixed = question.per_rank * compute.per_sample, compute.fixed
    waiting = best.step.compute - samples - fixed - compute.optimizer if best.step else 0.0
    slower = best.step.slower if best.step else 0.0
    agree = agreeing(question.profile, question.cluster)
    exposed = best.seconds - samples - fixed - compute.optimizer - waiting - slower - agree
    name = "input" if best.step and best.step.limit == "input" else "communication that nothing hides"
    return (
        ("computing samples", samples),
        ("computing, whatever the batch", fixed),
        ("optimizer", compute.optimizer),
        ("waiting for the slowest host", waiting),
        ("computing that communication slows down", slower),
        ("agreeing on what is ready, packing", agree),
        (name, exposed),
    )


def _warnings(question: Question, best: Candidate, effects: Iterable[Effect]) -> Iterator[str]:
    without = [f"{effect.input} ({effect.change})" for effect in effects if abs(effect.relative) < NO_EFFECT]
    if without:
        yield f"no effect on this plan, less than {NO_EFFECT:.2%} of the step: {', '.join(without)}"
    if best.algorithm.gossips:
        yield "gossip averages with one partner per step: it is not the same training as an all-reduce"
    elif best.step and best.step.limit == "communication" and best.step.exposed > LOCAL_PAYS * best.seconds:
        local = best.step.compute + best.step.communication / LOCAL_STEPS
        yield (
            f"ranks wait for communication for {best.step.exposed / best.seconds:.0%} of a step. With local steps,"
            f" sync=phalanx.DiLoCo(every={LOCAL_STEPS}), a step would take about {1e3 * local:.3g} ms: computing plus a"
            f" {LOCAL_STEPS}th of an all-reduce that nothing hides. It is not the same training: compare accuracies first."
            " --techniques prices this and other ways to send less"
        )
