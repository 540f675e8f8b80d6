"""A check and its result, as values, and how the results of all ranks are combined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from phalanx.comm.verdict import name_ranks

if TYPE_CHECKING:
    from phalanx.selftest.runner import Trial

NAMED = 8  # the most ranks that a reason lists


class Status(Enum):
    """How a check ended, ordered by weight: one failing rank makes the check fail."""

    PASS = "PASS"
    SKIP = "SKIP"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Result:
    """What a check found on one rank or on all. `figures` are plain data for the file."""

    status: Status
    reason: str
    remedy: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()  # those that failed


def passed(reason: str, **figures: Any) -> Result:
    """The check passed."""
    return Result(Status.PASS, reason, figures=figures)


def failed(reason: str, remedy: str, **figures: Any) -> Result:
    """The check failed; `remedy` says what you can do about it."""
    return Result(Status.FAIL, reason, remedy, figures)


def skipped(reason: str, remedy: str = "", **figures: Any) -> Result:
    """The check did not run."""
    return Result(Status.SKIP, reason, remedy, figures)


@dataclass(frozen=True, slots=True)
class Check:
    """A line of the selftest."""

    group: str
    name: str
    run: Callable[[Trial], Result]
    needs: float | None = 0.0  # seconds; with less time it does not start. None: it takes no time and always runs
    gpu: bool = False  # it is only for GPUs


@dataclass(frozen=True, slots=True)
class Outcome:
    """A check with the result of all ranks and the seconds of the slowest."""

    group: str
    name: str
    result: Result
    seconds: float


def to_data(result: Result) -> list[Any]:
    """The result as plain data, to send."""
    return [result.status.value, result.reason, result.remedy, result.figures]


def from_data(data: Sequence[Any]) -> Result:
    """The result that was sent."""
    status, reason, remedy, figures = data
    return Result(Status(status), reason, remedy, figures)


def together(results: Sequence[Result]) -> Result:
    """Combine the results of all ranks: FAIL if a rank failed, SKIP if a rank skipped, PASS if all passed.

    The reason is that of the first rank with this status. It names the ranks unless it applies to all.
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
    """The ranks as text, at most the first few."""
    return name_ranks(ranks) if len(ranks) <= NAMED else f"{name_ranks(ranks[:NAMED])} and {len(ranks) - NAMED} more"
