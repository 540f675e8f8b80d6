"""The notice board of an elastic job: signed keys of a store that the coordinator's process holds.

    process/M     member M is alive, and this is its process        written by M
    ready/M       M is ready to take part                           written by M
    epoch/E       the proposal of epoch E                           written by the coordinator
    report/E/M    how far M is as it enters epoch E                 written by M, once
    stood/E/M     M is connected to the others of epoch E           written by M
    broken/E      the connections of epoch E do not work            written by any member
    beat/M        M is alive, and how far it is                     written by M, repeatedly
    done/M        M has finished                                    written by M
    out/M         M is no longer in the job, and why                written by the coordinator
    stop          the job ends, and why                             written by the coordinator
    bell          unsigned; its text changes after each of the above, so that the coordinator looks

The agents of a job on several hosts have their own keys here (agents.py). The store is torch's TCPStore on a loopback address,
or on the address where the job meets. A client serves one thread at a time. A read waits for an answer, which never comes if
the network is cut. A write returns at once.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from phalanx.comm.elastic.agreement import Proposal, Report
from phalanx.comm.launch import MEETING, MEMBER, LaunchError, exported_secret
from phalanx.comm.processes import ProcessId
from phalanx.comm.signed import SignedStore, Signer, peek

PREFIX = "phalanx/elastic"
BELL = "phalanx/elastic/bell"
LOOK = 0.005  # seconds between two looks at what others must write


@dataclass(frozen=True, slots=True)
class MeetingPoint:
    """Where the board of a job is, and the job's token, which is part of every signature."""

    host: str
    port: int
    token: str

    def to_text(self) -> str:
        return f"{self.host}/{self.port}/{self.token}"

    @staticmethod
    def parse(text: str) -> MeetingPoint:
        found = re.fullmatch(r"([\w.:%-]+)/(\d{1,5})/([0-9a-f]{16})", text, re.ASCII)
        if found is None:
            raise LaunchError(f"{MEETING}={text!r} is not a meeting point: unset it, `phalanx run` sets it for its ranks")
        return MeetingPoint(found[1], int(found[2]), found[3])


def meeting_point(environ: Mapping[str, str] = os.environ) -> tuple[MeetingPoint, int] | None:
    """Where this process meets the others of an elastic job, and its member number; None if `phalanx run` did not start it."""
    if MEETING not in environ:
        return None
    member = environ.get(MEMBER, "")
    if not (member.isascii() and member.isdigit() and len(member) < 10):
        raise LaunchError(f"{MEMBER}={member!r} is not a number: unset {MEETING}, or start with `phalanx run`")
    return MeetingPoint.parse(environ[MEETING]), int(member)


@dataclass(frozen=True, slots=True)
class Ready:
    """What a member says when it is ready: the fewest and the most ranks that its script wants, and how long it waits."""

    least: int = 1
    most: int | None = None
    patience: float = 60.0

    def to_json(self) -> str:
        return json.dumps([self.least, self.most, self.patience])

    @staticmethod
    def from_json(text: bytes | str) -> Ready:
        least, most, patience = json.loads(text)
        return Ready(int(least), None if most is None else int(most), float(patience))


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life: a counter, the rounds that the member has committed, whether it waits in the next one, and for how many
    seconds it has sent and received nothing."""

    count: int
    committed: int
    waits: bool
    idle: float = 0.0

    def to_json(self) -> str:
        return json.dumps([self.count, self.committed, self.waits, round(self.idle, 2)])

    @staticmethod
    def from_json(text: bytes | str) -> Beat:
        count, committed, waits, idle = json.loads(text)
        return Beat(int(count), int(committed), bool(waits), float(idle))


class Board:
    """One client of the board, for one thread at a time."""

    def __init__(self, point: MeetingPoint, timeout: float, store: Any = None) -> None:
        """`store`: the store itself, in the process that holds it."""
        limit = datetime.timedelta(seconds=timeout)
        self.point, self._timeout = point, timeout
        self.base: Any = store or dist.TCPStore(point.host, point.port, None, False, limit, wait_for_workers=False)
        secret = exported_secret()
        if secret is None:
            raise LaunchError("an elastic job has a PHALANX_SECRET, but this process has none: start it with `phalanx run`")
        self.signer = Signer(secret, point.token)
        self.keys = SignedStore(self.base, f"{PREFIX}/{point.token}", self.signer, timeout)

    def another(self) -> Board:
        """A client of the same board, for another thread."""
        return Board(self.point, self._timeout)

    def under(self, prefix: str) -> SignedStore:
        """Other keys of the job, signed too."""
        return SignedStore(self.base, f"{PREFIX}/{self.point.token}/{prefix}", self.signer, self._timeout)

    def ring(self) -> None:
        self.base.set(BELL, secrets.token_hex(4))  # not `add`, which waits for an answer

    def rung(self) -> bytes | None:
        """The text of the bell. It differs from the last one if the bell was rung in between."""
        return peek(self.base, BELL)

    def _read(self, key: str) -> bytes | None:
        return self.keys.get(key) if self.keys.check([key]) else None

    # ---- members write --------------------------------------------------------------------------------------------------------

    def announce(self, member: int) -> None:
        self.keys.set(f"process/{member}", ProcessId.mine().to_text())

    def be_ready(self, member: int, ready: Ready) -> None:
        self.keys.set(f"ready/{member}", ready.to_json())
        self.ring()

    def report(self, epoch: int, member: int, report: Report) -> None:
        self.keys.set(f"report/{epoch}/{member}", report.to_json())

    def stand(self, epoch: int, member: int) -> None:
        self.keys.set(f"stood/{epoch}/{member}", "")
        self.ring()

    def complain(self, epoch: int) -> None:
        self.keys.set(f"broken/{epoch}", "")
        self.ring()

    def beat(self, member: int, beat: Beat) -> None:
        self.keys.set(f"beat/{member}", beat.to_json())

    def finish(self, member: int) -> None:
        self.keys.set(f"done/{member}", "")
        self.ring()

    # ---- the coordinator writes ------------------------------------------------------------------------------------------------

    def propose(self, proposal: Proposal) -> None:
        """Proposals stay: a process that was stopped for an hour must find the first one without it."""
        self.keys.set(f"epoch/{proposal.epoch}", proposal.to_json())

    def forget(self, epoch: int, members: tuple[int, ...]) -> None:
        """Remove what the members of an old epoch wrote."""
        self.keys.delete_key(f"broken/{epoch}")
        for member in members:
            for key in ("report", "stood"):
                self.keys.delete_key(f"{key}/{epoch}/{member}")

    def put_out(self, member: int, why: str) -> None:
        self.keys.set(f"out/{member}", why)

    def stop(self, why: str) -> None:
        self.keys.set("stop", why)

    # ---- and read --------------------------------------------------------------------------------------------------------------

    def proposal(self, epoch: int) -> Proposal | None:
        found = self._read(f"epoch/{epoch}")
        return None if found is None else Proposal.from_json(found)

    def newest(self, since: int) -> Proposal | None:
        """The newest proposal after epoch `since`; None if there is none."""
        found = None
        if not self.base.check([f"{PREFIX}/{self.point.token}/epoch/{since + 1}"]):  # unsigned, but cheap: asked all the time
            return None
        while (more := self.proposal((found.epoch if found else since) + 1)) is not None:
            found = more
        return found

    def reports(self, proposal: Proposal) -> list[Report] | None:
        """The reports of all members of the proposal; None until all have reported."""
        keys = [f"report/{proposal.epoch}/{member}" for member in proposal.members]
        if not self.keys.check(keys):
            return None
        return [Report.from_json(text) for text in self.keys.multi_get(keys)]

    def process(self, member: int) -> ProcessId | None:
        found = self._read(f"process/{member}")
        return None if found is None else ProcessId.parse(found.decode())

    def ready(self, member: int) -> Ready | None:
        found = self._read(f"ready/{member}")
        return None if found is None else Ready.from_json(found)

    def stood(self, epoch: int, member: int) -> bool:
        return self.keys.check([f"stood/{epoch}/{member}"])

    def broken(self, epoch: int) -> bool:
        return self.keys.check([f"broken/{epoch}"])

    def beat_of(self, member: int) -> Beat | None:
        found = self._read(f"beat/{member}")
        return None if found is None else Beat.from_json(found)

    def finished(self, member: int) -> bool:
        return self.keys.check([f"done/{member}"])

    def out(self, member: int) -> str | None:
        """Why a member is no longer in the job; None if it may still be in it."""
        found = self._read(f"out/{member}")
        return None if found is None else found.decode()

    def stopped(self) -> str | None:
        found = self._read("stop")
        return None if found is None else found.decode()


def wait_until(look: Any, seconds: float, pause: float = LOOK) -> Any:
    """The first result of `look()` that is not None; None after `seconds`."""
    until = time.monotonic() + seconds
    while (found := look()) is None:
        if time.monotonic() > until:
            return None
        time.sleep(pause)
    return found


@contextlib.contextmanager
def quietly() -> Any:
    """Ignore errors of the store, which may have ended."""
    with contextlib.suppress(RuntimeError, OSError):
        yield
