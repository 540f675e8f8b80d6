"""Turns the ranks' answers to an alarm into the message of the error: values and a pure function.

explain(mine, members, verdict) -> CommunicationError: all_reduce(float32[8], sum) (number 17) cannot finish: rank 2 ...
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum

from phalanx.comm.processes import Fate
from phalanx.comm.traffic import Ticket, Way


class CommunicationError(RuntimeError):
    """A communication that cannot finish.

    Attributes:
        operation: The call, such as "all_reduce(float32[8], sum)".
        missing: The ranks that it waits for, or that broke it.

    Example:
        >>> def play(comm):
        ...     if comm.rank == 1:
        ...         return "left early"
        ...     try:
        ...         comm.barrier()
        ...     except phalanx.CommunicationError as error:
        ...         return error.operation, error.missing
        >>> phalanx.run_local(2, play, timeout=1.0)
        [('barrier()', (1,)), 'left early']
    """

    __module__ = "phalanx"  # its public name, in tracebacks

    def __init__(self, message: str, *, operation: str = "", missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.operation = operation
        self.missing = tuple(missing)


@dataclass(frozen=True, slots=True)
class State:
    """What one rank is doing: operation number `number` of communicator `comm` or, with comm None, user code.

    `raised` is the exception that ended it. `left`: it closed its communicator, or ended. `fate` is what the kernel reports about
    a rank that cannot answer itself, and `pid` is its process. `awaited` are the messages it waits for, and `posted` counts those
    it has posted.
    """

    comm: str | None = None
    number: int = 0
    operation: str = ""
    seconds: float = 0.0
    raised: str = ""
    left: bool = False
    fate: Fate | None = None
    pid: int = 0
    awaited: tuple[Ticket, ...] = ()
    posted: tuple[Ticket, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> State:
        return _state(json.loads(text))


def _state(data: dict) -> State:
    tickets = {key: tuple(Ticket(Way(way), *rest) for way, *rest in data[key]) for key in ("awaited", "posted")}
    return State(**data | tickets | {"fate": Fate(data["fate"]) if data["fate"] is not None else None})


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answers to an alarm, by world rank. A rank that did not answer is not in it."""

    states: dict[int, State] = field(default_factory=dict)
    store_lost: int | None = None  # the rank that held the store, if the store itself does not answer
    world: int = 0  # ranks of the job: those outside the communicator may also be the cause

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> Verdict:
        data = json.loads(text)
        return Verdict({int(rank): _state(state) for rank, state in data["states"].items()}, data["store_lost"], data["world"])


class Call(Enum):
    """What the key that a watch waits for may hold."""

    ALARM = "alarm"  # an operation failed on some rank: answer with your state
    DESERTED = "deserted"  # the rank that holds the store is done
    STOP = "stop"  # from a rank to its own watch: stop listening


class Standing(Enum):
    """The role of a rank in an operation that cannot finish."""

    WAITING = 0  # it takes part, and waits for others
    LATE = 1  # it is elsewhere, and the cause only if no rank is lost
    LOST = 2  # it will never do its part


@dataclass(frozen=True, slots=True)
class Fact:
    """What is wrong with a rank, worded for one rank and for several."""

    standing: Standing
    of_one: str = ""
    of_several: str = ""


def explain(mine: State, members: Mapping[int, int], verdict: Verdict, cause: str = "") -> CommunicationError:
    """Return the error of a rank in state `mine`, in an operation of `members`, which maps ranks to world ranks."""
    facts = _facts(mine, members, verdict)
    lost, late = _only(Standing.LOST, facts), _only(Standing.LATE, facts)
    outside = {rank: rank for rank in range(verdict.world) if rank not in members.values()}
    elsewhere = _only(Standing.LOST, _facts(mine, outside, verdict))
    links = _still_links(members, verdict)
    # a lost rank explains why others are late, and so does a link that moves no data
    named = lost or ({} if elsewhere or links else late)
    if named:
        words = _words(named)
    elif elsewhere:
        words = f"the job is broken outside of its {_count(len(members))}: in the world, {_words(elsewhere)}"
    elif links:
        words = "; ".join(
            f"the link between rank {a} and rank {b} moves no data, or too slowly: one of them waits for what the other has sent"
            for a, b in links
        )
    else:
        words = f"all {len(members)} ranks entered, but no data is moving: the network is cut, or slower than the timeout allows"
    name = f"{mine.operation} (number {mine.number})" if mine.number else mine.operation
    return CommunicationError(
        f"{name} cannot finish: {words}" + (f" [{cause}]" if cause else ""),
        operation=mine.operation,
        missing=sorted(rank for ranks in named.values() for rank in ranks),
    )


def _facts(mine: State, members: Mapping[int, int], verdict: Verdict) -> dict[Fact, list[int]]:
    """Group ranks by what is wrong with them."""
    facts: dict[Fact, list[int]] = {}
    for rank, world_rank in members.items():
        facts.setdefault(_fact(mine, verdict.states.get(world_rank), world_rank == verdict.store_lost), []).append(rank)
    return facts


def _only(standing: Standing, facts: Mapping[Fact, list[int]]) -> dict[Fact, list[int]]:
    return {fact: ranks for fact, ranks in facts.items() if fact.standing is standing}


def _fact(mine: State, other: State | None, held_store: bool) -> Fact:
    """Return what is wrong with one rank, seen from `mine`."""
    if other is None or other.fate is not None:
        why = (
            "dead, stopped or cut off"
            if other is None or other.fate is None
            else f"its process {other.pid} is {other.fate.value}"
        )
        why += " (the job's store went with it)" if held_store else ""
        return Fact(Standing.LOST, f"does not answer: {why}", f"do not answer: {why}")
    if other.raised:
        return Fact(Standing.LOST, f"raised {other.raised}", f"raised {other.raised}")
    if other.left:
        return Fact(Standing.LOST, "has ended or closed its communicator", "have ended or closed their communicators")
    if other.comm is None:
        where = f"not called it: in user code for {other.seconds:.1f} s, last operation {other.operation or 'none'}"
        return Fact(Standing.LATE, f"has {where}", f"have {where}")
    if (other.comm, other.number, other.operation) == (mine.comm, mine.number, mine.operation):
        return Fact(Standing.WAITING)
    if mine.number and (other.comm, other.number) == (mine.comm, mine.number):
        return Fact(Standing.LOST, f"called {other.operation} instead", f"called {other.operation} instead")
    where = f"in {other.operation} (number {other.number}) for {other.seconds:.1f} s"
    return Fact(Standing.LATE, f"is {where}", f"are {where}")


def _still_links(members: Mapping[int, int], verdict: Verdict) -> list[tuple[int, int]]:
    """Return pairs of ranks where one waits for a message that the other has posted."""
    numbers = {world_rank: rank for rank, world_rank in members.items()}
    found = set()
    for world_rank, rank in numbers.items():
        state = verdict.states.get(world_rank)
        for ticket in state.awaited if state else ():
            peer = verdict.states.get(ticket.peer)
            if peer is None or ticket.peer not in numbers:
                continue
            matching = [
                other
                for other in peer.posted
                if other[:3] == (ticket.way.opposite, world_rank, ticket.tag) and other.number > ticket.number
            ]
            if matching:
                found.add(tuple(sorted((rank, numbers[ticket.peer]))))
    return sorted((a, b) for a, b in found)


def _words(facts: Mapping[Fact, Sequence[int]]) -> str:
    return "; ".join(
        f"rank {ranks[0]} {fact.of_one}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} {fact.of_several}"
        for fact, ranks in facts.items()
    )


def name_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 2`, or `ranks 1, 3`."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _count(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"
