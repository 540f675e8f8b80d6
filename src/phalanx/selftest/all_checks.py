"""The whole selftest: all groups in order, on the ranks of one communicator."""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from phalanx.comm.communicator import Communicator
from phalanx.comm.verdict import CommunicationError
from phalanx.selftest import correctness, failure, ordering, placement, speed, training
from phalanx.selftest.facts import Facts, gather_facts
from phalanx.selftest.render import to_record
from phalanx.selftest.result import Check, Outcome, Result, Status
from phalanx.selftest.runner import Run
from phalanx.train.environment import command, launcher


@dataclass(slots=True)
class Selftest:
    """A running selftest and its findings so far."""

    comm: Communicator
    device: torch.device
    seconds: float
    begun: float
    facts: list[Facts] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    broken: CommunicationError | None = None
    own: Result | None = None  # what failed on this rank, if the ranks could not agree

    def run(self, take: Callable[[Outcome], None], checks: Sequence[Check] | None = None) -> None:
        """Run all checks, or these. `take` gets each outcome as it arrives, on every rank."""
        self.facts = gather_facts(self.comm, self.device)
        if not all(own["gpu"] for own in self.facts):  # all ranks must test the same
            self.device = torch.device("cpu")
        run = Run(self.comm, self.device, seconds=self.seconds, begun=self.begun)
        for outcome in run.outcomes(all_checks(self.facts) if checks is None else checks):
            self.outcomes.append(outcome)
            self.broken, self.own = run.broken, run.own
            take(outcome)

    @property
    def failed(self) -> bool:
        """Whether a check failed."""
        return any(outcome.result.status is Status.FAIL for outcome in self.outcomes)

    @property
    def speaker(self) -> int:
        """The rank that prints and writes: the first one still alive."""
        missing = self.broken.missing if self.broken is not None else ()
        return next((rank for rank in range(self.comm.size) if rank not in missing), 0)

    def record(self) -> dict[str, Any]:
        """The whole selftest as plain data, for a file."""
        facts = {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "command": command(sys.argv),
            "launcher": launcher(),
            "ranks": self.comm.size,
            "hosts": sorted({own["host"] for own in self.facts}),
            "schedule": self.comm.schedule.name,
            "budget": self.seconds,
            "places": self.facts,
        }
        return to_record(facts, self.outcomes, time.monotonic() - self.begun)


def all_checks(facts: Sequence[Facts]) -> list[Check]:
    """Every check of the ranks with these facts, group by group."""
    groups = (correctness, ordering, training, speed, failure)
    return [*placement.checks(facts), *(check for group in groups for check in group.checks())]


def headline(comm: Communicator, facts: Sequence[Facts], seconds: float) -> str:
    """Describe what is tested, and where."""
    ranks = "1 rank" if comm.size == 1 else f"{comm.size} ranks"
    hosts = "1 host" if comm.inter_size == 1 else f"{comm.inter_size} hosts"
    device = facts[0]["gpu"]["name"] if facts and facts[0]["gpu"] else "CPU"
    return f"# phalanx selftest: {ranks} on {hosts}, {device}, started by {launcher()}, about {seconds:.0f} s for all checks"
