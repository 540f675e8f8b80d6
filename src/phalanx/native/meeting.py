"""How the ranks of a host find each other and map the same memory. In each phase all ranks write, read and conclude the same."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from phalanx._kernel import boot_id
from phalanx.native import core
from phalanx.native.errors import RankLate, ranks_text

METHODS = (0, 1)  # a memfd opened through /proc; a file in /dev/shm, removed as soon as all have mapped it


class Store(Protocol):
    """The part of a torch.distributed store that ranks use to find each other."""

    def set(self, key: str, value: str) -> None: ...
    def check(self, keys: list[str]) -> bool: ...
    def wait(self, keys: list[str], timeout: datetime.timedelta) -> None: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def delete_key(self, key: str) -> bool: ...


class Meeting(NamedTuple):
    """The core's team and the ranks' processes, or no team and the reason, which is the same on all ranks."""

    team: Any
    reason: str
    pids: Sequence[int]
    switched_off: bool = False  # by PHALANX_NATIVE=0


def meet(store: Store, rank: int, size: int, timeout: float, name: str) -> Meeting:
    """Meet the other ranks under `name`. Collective. Removes what the ranks wrote into the store."""
    met = _meet(store, rank, size, timeout, name)
    _delete_keys(store, rank, size, met.team, name)
    return met


def _meet(store: Store, rank: int, size: int, timeout: float, name: str) -> Meeting:
    def share(key: str, mine: str) -> list[str]:
        keys = [f"{name}/{key}/{r}" for r in range(size)]
        store.set(keys[rank], mine)
        _wait(store, keys, timeout, f"join of {name}", rank)
        return [text.decode() for text in store.multi_get(keys)]

    told = [json.loads(text) for text in share("hello", json.dumps(_identity()))]
    for what, words in (
        ("unavailable", "{value} on {who}"),
        ("kernel", "{who} runs on another kernel than rank 0"),
        ("pids", "{who} lives in another pid namespace (container) than rank 0"),
        ("layout", "{who} runs another build of the native core than rank 0"),
    ):
        expected = "" if what == "unavailable" else told[0][what]
        odd = [r for r in range(size) if told[r][what] != expected]
        if odd:
            value = told[odd[0]][what]
            return Meeting(None, words.format(who=ranks_text(odd), value=value), [], switched_off=value == core.SWITCHED_OFF)
    if size > core._native.MAX_RANKS:
        return Meeting(None, f"{size} ranks are more than {core._native.MAX_RANKS}", [])
    pids = [int(own["pid"]) for own in told]

    reasons = []
    for method in METHODS:
        team: Any = None
        place, reason = "", ""
        if rank == 0:
            team, reason = _enter(rank, size, None, method, timeout)
            place = team.place if team is not None else ""
        place = share(f"place{method}", place)[0]
        if rank != 0 and place:
            team, reason = _enter(rank, size, place, method, timeout)
        answers = share(f"mapped{method}", reason)
        if place and not any(answers):
            team.meet()
            return Meeting(team, "", pids)
        reasons.append(next(f"rank {r} cannot: {answer}" for r, answer in enumerate(answers) if answer))
        del team  # this also frees the segment, the descriptor and the name
    return Meeting(None, "; ".join(reasons), [])


def _delete_keys(store: Store, rank: int, size: int, team: Any, name: str) -> None:
    """Delete this meeting's keys from the store after all ranks have read them."""
    phases = ["hello", *(f"{phase}{method}" for method in METHODS for phase in ("place", "mapped"))]
    ranks: Sequence[int] = [rank]
    if team is None:  # the last rank to arrive deletes all keys
        store.set(f"{name}/left/{rank}", "")
        if not store.check([f"{name}/left/{r}" for r in range(size)]):
            return
        phases.append("left")
        ranks = range(size)
    elif team.barrier():
        return  # a rank died; the next call reports it
    for key in (f"{name}/{phase}/{r}" for phase in phases for r in ranks):
        store.delete_key(key)


def _enter(rank: int, size: int, place: str | None, method: int, timeout: float) -> tuple[Any, str]:
    try:
        return core._native.Team(rank, size, place, method, timeout), ""
    except OSError as error:
        return None, str(error)


def _identity() -> dict[str, str]:
    """What must match on ranks that share memory, and why this rank cannot, if it cannot."""
    unavailable = core.SWITCHED_OFF if os.environ.get("PHALANX_NATIVE") == "0" else core.UNAVAILABLE
    if unavailable:
        return {"unavailable": unavailable, "kernel": "", "pids": "", "layout": "", "pid": "0"}
    try:
        kernel = boot_id()
        pids = os.readlink("/proc/self/ns/pid")
    except OSError as error:
        return {"unavailable": f"no /proc ({error})", "kernel": "", "pids": "", "layout": "", "pid": "0"}
    return {"unavailable": "", "kernel": kernel, "pids": pids, "layout": core._native.LAYOUT, "pid": str(os.getpid())}


def sweep(pids: Sequence[int]) -> None:
    """Remove files in /dev/shm that these dead processes created and did not unlink."""
    for pid in pids:
        for path in Path("/dev/shm").glob(f"phalanx-{pid}-*"):
            with contextlib.suppress(OSError):  # another survivor was faster
                path.unlink()


def _wait(store: Store, keys: list[str], timeout: float, what: str, rank: int) -> None:
    try:
        store.wait(keys, datetime.timedelta(seconds=timeout))
    except RuntimeError:
        late = [r for r, key in enumerate(keys) if not _has(store, key)]
        if not late:
            return
        raise RankLate(f"{what}: {ranks_text(late)} did not come within {timeout:g} s", author=rank, late=late) from None


def _has(store: Store, key: str) -> bool:
    try:
        store.wait([key], datetime.timedelta(milliseconds=10))
    except RuntimeError:
        return False
    return True
