"""One check and its result, as values, and what the results of all ranks make together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from phalanx.comm.verdict import name_ranks

if TYPE_CHECKING:
    from phalanx.selftest.runner import Trial

NAMED = 8  # ranks that a reason lists at most


class Status(Enum):
    """How a check ended. The order is that of their weight: one rank that fails makes the check fail."""

    PASS = "PASS"
    SKIP = "SKIP"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Result:
    """What a check found: on one rank, or on all. `figures` are plain data for the file."""

    status: Status
    reason: str
    remedy: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()  # those that failed


def passed(reason: str, **figures: Any) -> Result:
    """All is well."""
    return Result(Status.PASS, reason, figures=figures)


def failed(reason: str, remedy: str, **figures: Any) -> Result:
    """Something is wrong, and what you can do about it."""
    return Result(Status.FAIL, reason, remedy, figures)


def skipped(reason: str, remedy: str = "", **figures: Any) -> Result:
    """Nothing was checked."""
    return Result(Status.SKIP, reason, remedy, figures)


@dataclass(frozen=True, slots=True)
class Check:
    """A line of the selftest."""

    group: str
    name: str
    run: Callable[[Trial], Result]
    needs: float | None = 0.0  # seconds below which it is not worth starting; None takes no time and always runs
    gpu: bool = False  # it checks nothing on CPUs


@dataclass(frozen=True, slots=True)
class Outcome:
    """A check with the result of all ranks and the seconds of the slowest."""

    group: str
    name: str
    result: Result
    seconds: float


def to_data(result: Result) -> list[Any]:
    """As plain data, to send."""
    return [result.status.value, result.reason, result.remedy, result.figures]


def from_data(data: Sequence[Any]) -> Result:
    """As it was sent."""
    status, reason, remedy, figures = data
    return Result(Status(status), reason, remedy, figures)


def together(results: Sequence[Result]) -> Result:
    """The result of all ranks: FAIL if a rank failed, SKIP if a rank skipped, PASS if all passed.

    The reason is that of the first rank with this status. It names the ranks unless all of them say the same.
    """
    worst = max(results, key=lambda result: list(Status).index(result.status)).status
    ranks = [rank for rank, result in enumerate(results) if result.status is worst]
    first = results[ranks[0]]
    figures = results[0].figures or first.figures
    if worst is not Status.FAIL:
        return replace(first, figures=figures)
    same = len(ranks) == len(results) and all(result.reason == first.reason for result in results)
    if not same:
        others = {rank: results[rank].reason for rank in ranks[1:] if results[rank].reason != first.reason}
        first = replace(first, reason=f"{some_ranks(ranks)}: {first.reason}")
        figures = figures | {"reasons": {str(rank): reason for rank, reason in others.items()}} if others else figures
    return replace(first, figures=figures, ranks=tuple(ranks))


def some_ranks(ranks: Sequence[int]) -> str:
    """In words; of many ranks the first few."""
    return name_ranks(ranks) if len(ranks) <= NAMED else f"{name_ranks(ranks[:NAMED])} and {len(ranks) - NAMED} more"
