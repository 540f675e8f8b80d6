"""Work on all ranks and agree on the outcome: an error of one rank is raised on all, so no rank waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from phalanx.comm.communicator import Communicator
from phalanx.train.checkpoint.errors import CheckpointError, DamagedError

T = TypeVar("T")


class DamageSeenError(Exception):
    """A rank cannot read a checkpoint, and all ranks know. The message names the rank and the reason."""


def together(comm: Communicator, work: Callable[[], T], before: BaseException | None = None) -> T:
    """Run `work` and return its result. An error on any rank, or one in `before`, is raised on all ranks."""
    result, error = None, before
    if error is None:
        try:
            result = work()
        except Exception as caught:  # noqa: BLE001  raised below, when the others know
            error = caught
    reports = comm.allgather_obj(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, text in enumerate(reports):
        if text is not None:
            raise CheckpointError(f"rank {rank}: {text}")
    return result  # type: ignore[return-value]


def undamaged(comm: Communicator, work: Callable[[], T]) -> T:
    """Like `together`, but if damage is the worst that any rank found, all raise `DamageSeenError` with the first one."""
    result, error = None, None
    try:
        result = work()
    except Exception as caught:  # noqa: BLE001  raised below, when the others know
        error = caught
    damaged = isinstance(error, DamagedError)
    reports = comm.allgather_obj(
        None if error is None else (damaged, str(error) if damaged else f"{type(error).__name__}: {error}")
    )
    found = [(rank, *own) for rank, own in enumerate(reports) if own is not None]
    if found and all(only_damage for _, only_damage, _ in found):
        rank, _, text = found[0]
        raise DamageSeenError(text + (f" (seen by rank {rank})" if comm.size > 1 else "")) from error
    if error is not None and not damaged:
        raise error
    for rank, only_damage, text in found:
        if not only_damage:
            raise CheckpointError(f"rank {rank}: {text}")
    return result  # type: ignore[return-value]


def from_rank_0(comm: Communicator, work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and return its result, plain data, on all ranks. Its CheckpointError is raised on all."""

    def ask() -> tuple[T, str | None]:
        result, error = None, None
        if comm.rank == 0:
            try:
                result = work()
            except CheckpointError as caught:
                error = str(caught)
        answer: tuple[T, str | None] = comm.bcast_obj((result, error))
        return answer

    result, error = comm.as_one(ask)
    if error is not None:
        raise CheckpointError(error)
    return result


def same_everywhere(comm: Communicator, step: int, names: list[str]) -> None:
    """Raise on all ranks unless they save the same step and the same names."""
    ranks = comm.allgather_obj((step, names))
    odd = [rank for rank, own in enumerate(ranks) if own != ranks[0]]
    if odd:
        raise CheckpointError(f"ranks save different things: rank 0 {ranks[0]}, rank {odd[0]} {ranks[odd[0]]}")
