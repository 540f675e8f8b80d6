"""Single faults in lowered schedules: none that computes a wrong sum is accepted, none that computes the right one is blamed."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from tests.schedule import oracle

from phalanx.schedule import (
    Move,
    Schedule,
    ScheduleError,
    Step,
    halving_doubling,
    hierarchical,
    lower,
    recursive_doubling,
    ring,
    torus,
    tree,
    verify,
)

FAULTS = ("drop", "duplicate", "repeat later", "wrong source", "wrong destination", "wrong chunk", "reduce for copy", "too late")
SMALL = [
    ring(3),
    ring(5),
    torus(2, 3),
    torus(3, 2),
    torus(2, 2, 2),
    hierarchical(3, 2),
    halving_doubling(6),
    halving_doubling(8),
    recursive_doubling(5),
    tree(5, pipeline=2),
    tree(8, pipeline=1),
]
LARGE = [torus(6, 11), hierarchical(11, 6), halving_doubling(70), tree(66, pipeline=2)]  # checked by fingerprints


def with_fault(s: Schedule, fault: str, rng: random.Random) -> Schedule:
    """`s` with one random op made wrong."""
    steps = [list(step.ops) for step in s.steps]
    t = rng.randrange(len(steps))
    i = rng.randrange(len(steps[t]))
    op = steps[t][i]
    assert isinstance(op, Move)
    others = [rank for rank in range(s.world) if rank not in (op.src, op.dst)]
    if fault == "drop":
        del steps[t][i]
    elif fault == "duplicate":
        steps[t].append(op)
    elif fault == "repeat later":
        steps.insert(rng.randrange(t, len(steps)) + 1, [op])
    elif fault == "wrong source":
        steps[t][i] = replace(op, src=rng.choice(others))
    elif fault == "wrong destination":
        steps[t][i] = replace(op, dst=rng.choice(others))
    elif fault == "wrong chunk":
        start = rng.choice([c for c in range(max(1, s.chunks - len(op.chunks) + 1)) if c != op.chunks.start] or [None])
        if start is None:  # the whole buffer moves: leave some of it out
            cut = op.chunks[1:] or op.chunks
            steps[t][i] = replace(op, chunks=cut)
        else:
            steps[t][i] = replace(op, chunks=range(start, start + len(op.chunks)))
    elif fault == "reduce for copy":
        steps[t][i] = replace(op, reduce=not op.reduce)
    elif fault == "too late":
        del steps[t][i]
        steps.insert(t + 1, [op]) if t + 1 == len(steps) else steps[t + 1].append(op)
    return replace(s, steps=tuple(Step(tuple(ops)) for ops in steps))


def complaint_about(s: Schedule) -> str:
    """What the checker says against `s`; nothing, if it accepts it."""
    try:
        verify(s)
    except ScheduleError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("schedules", "each"), [(SMALL, 16), (LARGE, 4)], ids=["formal sums", "fingerprints"])
def test_no_wrong_sum_is_accepted(schedules, each):
    rng = random.Random(2)
    seen: Counter[str] = Counter()
    rejected: Counter[str] = Counter()
    for s in map(lower, schedules):
        verify(s)
        for fault in FAULTS:
            for _ in range(each):
                mutant = with_fault(s, fault, rng)
                if [step.ops for step in mutant.steps] == [step.ops for step in s.steps]:
                    continue  # one chunk in all: there is no wrong one
                seen[fault] += 1
                complaint = complaint_about(mutant)
                rejected[fault] += bool(complaint)
                if not complaint:
                    assert oracle.sums_everything(mutant), f"accepted although wrong: {fault} in {s.name}"
                elif " ends as " in complaint:
                    assert not oracle.sums_everything(mutant), f"rejected although right: {complaint}"
                    found, wanted = complaint.split(" ends as ")[1].split(" (step ")[0].split(", wanted ")
                    assert found != wanted, complaint
    assert sum(seen.values()) >= (1300 if schedules is SMALL else 120)
    assert sum(rejected.values()) >= 0.8 * sum(seen.values())
    for fault in FAULTS:  # a copy that is repeated later does no harm as a rule; most other faults do
        assert rejected[fault] >= (0.1 if fault == "repeat later" else 0.7) * seen[fault] > 0, fault


def test_a_dropped_move_is_always_rejected():
    for s in map(lower, SMALL):
        for t, step in enumerate(s.steps):
            for i in range(len(step.ops)):
                ops = (*step.ops[:i], *step.ops[i + 1 :])
                with pytest.raises(ScheduleError, match="ends as"):
                    verify(replace(s, steps=(*s.steps[:t], Step(ops), *s.steps[t + 1 :])))
