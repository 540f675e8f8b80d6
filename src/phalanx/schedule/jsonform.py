"""Schedules as JSON, for other programs. `from_json(to_json(s)) == s`; `text` is the form for people."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any, cast

from .limits import MAX_DIGITS, check_name, check_size, read_factor
from .ops import ONE, Chunks, Collective, Goal, Kind, Move, Op, Recode, Scale, Schedule, ScheduleError, Step
from .plain_json import brief, loads
from .wellformed import GOALS, KINDS


def to_json(s: Schedule) -> str:
    """Write a schedule as JSON, for other programs: one line per step, runs as [start, stop], several per message in a list.

    Args:
        s: The schedule.

    Returns:
        JSON that `from_json` reads back.

    Example:
        >>> import json
        >>> json.loads(phalanx.schedule.to_json(phalanx.ring(2)))["world"]
        2
    """
    steps = ",\n".join(json.dumps({"label": step.label, "ops": [_op_to_json(op) for op in step.ops]}) for step in s.steps)
    head = {"schedule": s.name, "world": s.world, "chunks": s.chunks, "goal": s.goal, "root": s.root}
    return f'{json.dumps(head)[:-1]}, "steps": [\n{steps}\n]}}\n'


def from_json(text: str) -> Schedule:
    """Read a schedule from JSON. Use `verify` to check it.

    Args:
        text: What `to_json` wrote.

    Returns:
        The schedule.

    Raises:
        ScheduleError: If the text is not a schedule. The message names the line, or the step and op.

    Example:
        >>> s = phalanx.torus(2, 2)
        >>> phalanx.schedule.from_json(phalanx.schedule.to_json(s)) == s
        True
    """
    try:
        data = loads(text, deepest=None)
    except ValueError as error:
        raise ScheduleError(f"not a schedule: {error}") from None
    return from_data(data)


def from_data(data: Any) -> Schedule:
    """Build a schedule from parsed JSON, which may be a part of a larger document."""
    name, world, chunks, goal, root, steps = _fields(data, "the schedule", "schedule", "world", "chunks", "goal", "root", "steps")
    if goal not in GOALS:
        raise ScheduleError(f"the schedule: goal {brief(goal)} is none of {', '.join(GOALS)}")
    check_size(_typed(int, world, "world"), _typed(int, chunks, "chunks"))
    return Schedule(
        check_name(_typed(str, name, "the schedule's name")),
        world,
        chunks,
        tuple(_step(step, number) for number, step in enumerate(_typed(list, steps, "steps"), start=1)),
        cast("Goal", goal),
        _typed(int, root, "root"),
    )


def _step(data: Any, number: int) -> Step:
    label, ops = _fields(data, f"step {number}", "label", "ops")
    numbered = enumerate(_typed(list, ops, f"the ops of step {number}"), start=1)
    return Step(
        tuple(_op_from_json(op, f"step {number}, op {i}") for i, op in numbered),
        check_name(_typed(str, label, f"the label of step {number}")),
    )


def _op_to_json(op: Op) -> dict[str, Any]:
    if isinstance(op, Move):
        move = {"op": "add" if op.reduce else "copy", "src": op.src, "dst": op.dst, "chunks": _runs_to_json(op)}
        move |= {} if op.factor is ONE else {"factor": str(op.factor)}
        return move | {"coded": True} if op.coded else move
    if isinstance(op, Collective):
        return {"op": op.kind, "group": op.group, "chunks": _run_to_json(op.chunks)}
    if isinstance(op, Recode):
        ranks = _run_to_json(op.ranks)
        return {"op": "encode" if op.coded else "decode", "ranks": ranks, "chunks": _run_to_json(op.chunks)}
    return {"op": "scale", "ranks": _run_to_json(op.ranks), "chunks": _run_to_json(op.chunks), "factor": str(op.factor)}


def _op_from_json(data: Any, where: str) -> Op:
    kind, chunks = _fields(data, where, "op", "chunks")
    if kind in ("copy", "add"):
        src, dst = _fields(data, where, "src", "dst")
        runs = _runs_from_json(chunks, f"{where}: chunks")
        factor = _factor(data["factor"], where) if "factor" in data else ONE
        coded = _typed(bool, data.get("coded", False), f"{where}: coded")
        ends = _typed(int, src, f"{where}: src"), _typed(int, dst, f"{where}: dst")
        return Move(*ends, runs, kind == "add", factor, coded)
    run = _run_from_json(chunks, f"{where}: chunks")
    if kind in KINDS:
        (group,) = _fields(data, where, "group")
        ranks = tuple(_typed(int, rank, f"{where}: a rank") for rank in _typed(list, group, f"{where}: group"))
        return Collective(cast("Kind", kind), ranks, run)
    if kind == "scale":
        scaled, factor = _fields(data, where, "ranks", "factor")
        return Scale(_run_from_json(scaled, f"{where}: ranks"), run, _factor(factor, where))
    if kind in ("encode", "decode"):
        (ranks,) = _fields(data, where, "ranks")
        return Recode(_run_from_json(ranks, f"{where}: ranks"), run, kind == "encode")
    raise ScheduleError(f"{where}: {brief(kind)} is none of copy, add, scale, encode, decode, {', '.join(KINDS)}")


def _factor(data: Any, where: str) -> Fraction:
    try:
        return read_factor(_typed(str, data, "factor"))
    except ScheduleError as error:
        raise ScheduleError(f"{where}: {error}") from None


def _runs_to_json(op: Move) -> list[Any]:
    return _run_to_json(op.chunks) if isinstance(op.chunks, range) else [_run_to_json(run) for run in op.chunks]


def _runs_from_json(data: Any, where: str) -> Chunks:
    """`[0, 2]`, or several runs of one message: `[[0, 2], [4, 5]]`."""
    if isinstance(data, list) and data and all(isinstance(run, list) for run in data):
        return tuple(_run_from_json(run, where) for run in data)
    return _run_from_json(data, where)


def _run_to_json(run: range) -> list[int]:
    return [run.start, run.stop] if run.step == 1 else [run.start, run.stop, run.step]


def _run_from_json(data: Any, where: str) -> range:
    numbers = [_typed(int, number, where) for number in _typed(list, data, where)]
    if len(numbers) not in (2, 3) or numbers[2:] == [0]:
        raise ScheduleError(f"{where} {brief(data)} is not a run [start, stop]")
    return range(*numbers)


def _fields(data: Any, where: str, *names: str) -> list[Any]:
    if not isinstance(data, dict) or not set(names) <= data.keys():
        raise ScheduleError(f"{where} is not an object with {', '.join(names)}")
    return [data[name] for name in names]


def _typed(kind: type[Any], value: Any, where: str) -> Any:
    if type(value) is not kind:  # a bool does not count as an int
        raise ScheduleError(f"{where}: {brief(value)} is not {'an' if kind is int else 'a'} {kind.__name__}")
    if kind is int and abs(value) >= 10**MAX_DIGITS:
        raise ScheduleError(f"{where}: {brief(value)} has more than {MAX_DIGITS} digits")
    return value
