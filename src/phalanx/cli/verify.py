"""`phalanx verify`: prove that a schedule does what it claims, as collectives and as single messages."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

from phalanx.cli.terminal import tell
from phalanx.cli.usage import UsageError
from phalanx.schedule import Schedule, ScheduleError, lowered_ops, verify
from phalanx.schedule.limits import MAX_LOWERED, MAX_WORK, work
from phalanx.schedule.names import FORMS, find_schedule
from phalanx.schedule.printable import one_line
from phalanx.schedule.verify import verify_lowered

EXAMPLES = """examples:
  phalanx verify torus:64x64      4,096 ranks, a million messages
  phalanx verify mine.txt         your own schedule, as written by: phalanx show ring:4 --text
"""


def add_to(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `verify` to the command line."""
    parser = verbs.add_parser(
        "verify",
        help="prove that a schedule does what it claims",
        description="Prove that every rank ends with what the schedule claims, as collectives and as single messages.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "schedule", metavar="SCHEDULE", help=f"{FORMS}; or a file: text, JSON, the XML of MSCCL or the JSON of MSCCL++"
    )
    parser.add_argument("--all", action="store_true", help=f"check more than {MAX_LOWERED:,} messages, however long it takes")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Verify both levels and print the result in one line; 1 if the schedule is wrong."""
    try:
        print(_proof(args))
    except ScheduleError as error:
        tell(error)
        return 1
    return 0


def _proof(args: argparse.Namespace) -> str:
    start = time.perf_counter()
    s = find_schedule(args.schedule)
    if not args.all and work(s) > MAX_WORK:
        raise UsageError(
            f"{args.schedule}: checking it takes {work(s):,} additions, more than {MAX_WORK:,}; --all checks it anyway"
        )
    facts = [f"{s.name}: {_count(s.world, 'rank')}, goal {s.goal}"]
    with _no_cycles():
        bits = _prove(s)
        facts.append(_size(len(s.steps), sum(len(step.ops) for step in s.steps)))
        if lowered_ops(s) > MAX_LOWERED and not args.all:
            facts.append(f"lowered {lowered_ops(s):,} ops not checked (--all checks them)")
        elif not s.lowered:
            facts.append(f"lowered {_size(*verify_lowered(s))}")
    return one_line(f"ok  {'; '.join([*facts, bits])}; {time.perf_counter() - start:.2f} s")


def _prove(s: Schedule) -> str:
    """Verify the claim of `s`, and find out whether all ranks end with equal bits."""
    if s.goal == "mixing":
        verify(s)
        return "each rank has its own mixture"
    try:
        verify(s, bitwise=True)
    except ScheduleError as error:
        verify(s)
        return f"but {str(error).removeprefix(f'{s.name}: ')}"
    return "equal bits on all ranks"


def _size(steps: int, ops: int) -> str:
    return f"{_count(steps, 'step')}, {_count(ops, 'op')}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


@contextmanager
def _no_cycles() -> Iterator[None]:
    """Disable the cycle collector, which would scan a million moves repeatedly and find nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
