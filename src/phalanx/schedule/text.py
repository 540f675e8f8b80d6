"""Schedules as text: one line per op, for people, files and diffs. `from_text(to_text(s)) == s`.

    schedule "ring(2), by hand"
    world 2
    chunks 2
    goal sum
    root 0
    step "reduce-scatter"
      add 0 -> 1 [1]
      add 1 -> 0 [0]
    step "all-gather"
      copy 0 -> 1 [0]
      copy 1 -> 0 [1]

The other ops are `all_reduce 0 1 2 [0:6]` (likewise reduce_scatter, all_gather, reduce, broadcast), `scale 0:4 [0] by 1/2`, and
`encode 0:4 [0]` and `decode 0:4 [0]`. Messages of encoded chunks end in `coded`: `add 0 -> 1 [4] coded`.
Runs are half-open, as in Python: `[0:6]` are the chunks 0 to 5, `[4]` is chunk 4. One message can carry several runs:
`copy 0 -> 1 [0:2 4]`. `add 0 -> 1 [4] by 1/2` multiplies what arrives. Lines that begin with # are comments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import cast

from .limits import MAX_DIGITS, check_name, check_size, read_factor
from .ops import ONE, Collective, Goal, Kind, Move, Op, Recode, Scale, Schedule, ScheduleError, Step
from .wellformed import GOALS, KINDS

HEADER = ("schedule", "world", "chunks", "goal", "root")
INT = rf"-?\d{{1,{MAX_DIGITS}}}"
RUN = rf"({INT}(?::{INT}){{0,2}})"
MOVE = re.compile(rf"(copy|add) ({INT}) -> ({INT}) \[([-\d: ]+)\](?: by (\S+))?( coded)?", re.ASCII)
COLLECTIVE = re.compile(rf"({'|'.join(KINDS)})((?: {INT})*) \[{RUN}\]", re.ASCII)
SCALE = re.compile(rf"scale {RUN} \[{RUN}\] by (\S+)", re.ASCII)
RUNS = re.compile(rf"{RUN}(?: {RUN})*", re.ASCII)
RECODE = re.compile(rf"(encode|decode) {RUN} \[{RUN}\]", re.ASCII)
SHOWN = 120  # characters of a line in a message


def to_text(s: Schedule) -> str:
    """Write a schedule as text, one line per op, for people, files and diffs.

    Args:
        s: The schedule.

    Returns:
        Text that `from_text` reads back.

    Example:
        >>> print(phalanx.schedule.to_text(phalanx.ring(2)))
        schedule "ring(2)"
        world 2
        chunks 2
        goal sum
        root 0
        step "all-reduce"
          all_reduce 0 1 [0:2]
        <BLANKLINE>
    """
    lines = [f"schedule {json.dumps(s.name)}", f"world {s.world}", f"chunks {s.chunks}", f"goal {s.goal}", f"root {s.root}"]
    for step in s.steps:
        lines.append(f"step {json.dumps(step.label)}")
        lines += [f"  {_op_to_text(op)}" for op in step.ops]
    return "\n".join(lines) + "\n"


def from_text(text: str) -> Schedule:
    """Read a schedule from text, written by `to_text` or by hand. Use `verify` to check it.

    Args:
        text: One line per op. Lines that begin with # are comments.

    Returns:
        The schedule.

    Raises:
        ScheduleError: If a line is invalid. The message names the line.

    Example:
        >>> s = phalanx.ring(4)
        >>> phalanx.schedule.from_text(phalanx.schedule.to_text(s)) == s
        True
    """
    lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), start=1)]
    lines = [(number, line) for number, line in lines if line and not line.startswith("#")]
    header: list[str] = []
    for place, keyword in enumerate(HEADER):
        number, line = lines[place] if place < len(lines) else (text.count("\n") + 1, "")
        found, _, value = line.partition(" ")
        if found != keyword:
            raise ScheduleError(f"line {number}: {_shown(line)} where '{keyword} ...' was expected")
        header.append(value)
    at = {keyword: lines[place][0] for place, keyword in enumerate(HEADER)}
    name, world, chunks, goal, root = header
    if goal not in GOALS:
        raise ScheduleError(f"line {at['goal']}: goal {_shown(goal)} is none of {', '.join(GOALS)}")
    ranks, pieces = _integer(world, at["world"]), _integer(chunks, at["chunks"])
    check_size(ranks, pieces)
    return Schedule(
        _string(name, at["schedule"]),
        ranks,
        pieces,
        tuple(_steps(lines[len(HEADER) :])),
        cast("Goal", goal),
        _integer(root, at["root"]),
    )


def _steps(lines: list[tuple[int, str]]) -> Iterator[Step]:
    label: str | None = None
    ops: list[Op] = []
    for number, line in lines:
        if line.startswith("step "):
            if label is not None:
                yield Step(tuple(ops), label)
            label, ops = _string(line.removeprefix("step "), number), []
        elif label is None:
            raise ScheduleError(f"line {number}: {_shown(line)} where 'step ...' was expected")
        else:
            ops.append(_op_from_text(line, number))
    if label is not None:
        yield Step(tuple(ops), label)


def _op_to_text(op: Op) -> str:
    if isinstance(op, Move):
        by = "" if op.factor is ONE else f" by {op.factor}"
        runs = " ".join(map(_run_to_text, op.runs))
        return f"{'add' if op.reduce else 'copy'} {op.src} -> {op.dst} [{runs}]{by}{' coded' * op.coded}"
    if isinstance(op, Collective):
        return " ".join([op.kind, *map(str, op.group), f"[{_run_to_text(op.chunks)}]"])
    if isinstance(op, Recode):
        return f"{'encode' if op.coded else 'decode'} {_run_to_text(op.ranks)} [{_run_to_text(op.chunks)}]"
    return f"scale {_run_to_text(op.ranks)} [{_run_to_text(op.chunks)}] by {op.factor}"


def _op_from_text(line: str, number: int) -> Op:
    try:
        if (found := MOVE.fullmatch(line)) and RUNS.fullmatch(found.group(4)):
            verb, src, dst, chunks, by, coded = found.groups()
            runs = tuple(map(_run_from_text, chunks.split(" ")))
            run = runs[0] if len(runs) == 1 else runs
            return Move(int(src), int(dst), run, verb == "add", read_factor(by) if by else ONE, coded is not None)
        if found := COLLECTIVE.fullmatch(line):
            kind, group, chunks = found.groups()
            return Collective(cast("Kind", kind), tuple(map(int, group.split())), _run_from_text(chunks))
        if found := SCALE.fullmatch(line):
            ranks, chunks, factor = found.groups()
            return Scale(_run_from_text(ranks), _run_from_text(chunks), read_factor(factor))
        if found := RECODE.fullmatch(line):
            verb, ranks, chunks = found.groups()
            return Recode(_run_from_text(ranks), _run_from_text(chunks), verb == "encode")
    except ValueError as error:  # a run in steps of zero
        raise ScheduleError(f"line {number}: {_shown(line)}: {error}") from None
    raise ScheduleError(
        f"line {number}: {_shown(line)} is none of 'step \"...\"', 'copy 0 -> 1 [4]', 'add 0 -> 1 [4:6 9]', 'all_reduce 0 1"
        " [0:2]', 'scale 0:2 [0] by 1/2', 'encode 0:2 [0]', 'decode 0:2 [0]'"
    )


def _run_to_text(run: range) -> str:
    if run.step != 1:
        return f"{run.start}:{run.stop}:{run.step}"
    return str(run.start) if len(run) == 1 else f"{run.start}:{run.stop}"


def _run_from_text(text: str) -> range:
    numbers = [int(number) for number in text.split(":")]
    return range(numbers[0], numbers[0] + 1) if len(numbers) == 1 else range(*numbers)


def _string(text: str, number: int) -> str:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, str):
        raise ScheduleError(f'line {number}: {_shown(text)} is not a text in double quotes, such as "all-gather"')
    return check_name(value)


def _integer(text: str, number: int) -> int:
    if not re.fullmatch(INT, text, re.ASCII):
        raise ScheduleError(f"line {number}: {_shown(text)} is not a whole number")
    return int(text)


def _shown(line: str) -> str:
    return repr(line) if len(line) <= SHOWN else f"{line[:SHOWN]!r}..."
