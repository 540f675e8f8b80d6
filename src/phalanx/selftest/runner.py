"""Run one check after another within the time limit. All ranks run the same checks and agree on every result.

A check that raises fails on that rank only, and the other ranks learn it at the end of the check. If the communicator itself
breaks, the check fails with the communicator's message, and the remaining checks are skipped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from phalanx.comm.communicator import Communicator
from phalanx.comm.verdict import CommunicationError
from phalanx.selftest.result import Check, Outcome, Result, Status, failed, from_data, skipped, to_data, together

# The fraction of the time by which a group should be done. Unused time goes to the next groups. A late group does as little as
# possible, and is skipped only if nothing would be left for the groups after it.
SHARES = {"placement": 0.02, "correctness": 0.24, "ordering": 0.31, "training": 0.58, "speed": 0.78, "failure": 1.0}

REPORT_IT = "this is an error of Phalanx or of the machine: report it with the file that --json writes"


@dataclass(frozen=True, slots=True)
class Trial:
    """The inputs of a check: a communicator, the device to test besides the CPU, and the seconds that it may take."""

    comm: Communicator
    device: torch.device
    seconds: float
    begun: float

    @property
    def devices(self) -> list[torch.device]:
        """The CPU and this rank's GPU, if it has one."""
        return [torch.device("cpu"), *([self.device] if self.device.type != "cpu" else [])]

    def has_time(self, share: float = 1.0) -> bool:
        """Whether less than this fraction of the time has passed, by rank 0's clock. All ranks call it."""
        return bool(self.comm.bcast_obj(time.monotonic() - self.begun < share * self.seconds))


class Run:
    """The checks of one selftest. Iterate over `outcomes`; afterwards `broken` says why checks were skipped, if any were."""

    def __init__(self, comm: Communicator, device: torch.device, *, seconds: float, begun: float) -> None:
        """`device` has the same type on all ranks. `begun`: when the selftest began, by `time.monotonic()`."""
        self.comm, self.device, self.seconds, self.begun = comm, device, seconds, begun
        self.broken: CommunicationError | None = None
        self.own: Result | None = None  # what failed on this rank, if the ranks could not agree

    def outcomes(self, checks: Sequence[Check]) -> Iterator[Outcome]:
        """Yield the result of every check, the same on all ranks while the communicator works."""
        elapsed = started = self._first_agreement()
        self.seconds = max(
            self.seconds, started + self.seconds / 2
        )  # if processes start slowly, half of the time is still for checks
        for i, check in enumerate(checks):
            until = started + max(0.0, self.seconds - started) * SHARES[check.group]
            others = sum(other.group == check.group and not self._is_skipped(other) for other in checks[i:])
            kept = sum(other.needs or 0.0 for other in checks[i:] if other.group != check.group and not self._is_skipped(other))
            end = self.seconds - (kept if kept < self.seconds / 2 else 0.0)
            if self.broken is not None:
                yield Outcome(check.group, check.name, skipped("the communicator broke before"), 0.0)
            elif self._is_skipped(check):
                yield Outcome(check.group, check.name, skipped("the ranks compute on CPUs"), 0.0)
            elif check.needs is not None and elapsed + check.needs >= end:
                yield Outcome(check.group, check.name, self._no_time(elapsed), 0.0)
            else:
                before = elapsed
                result, elapsed = self._try(check, max(0.0, until - elapsed) / others, elapsed)
                yield Outcome(check.group, check.name, result, elapsed - before)

    def _first_agreement(self) -> float:
        try:
            return float(max(self.comm.allgather_obj(time.monotonic() - self.begun)))
        except CommunicationError as error:
            self.broken = error
            return time.monotonic() - self.begun

    def _try(self, check: Check, seconds: float, elapsed: float) -> tuple[Result, float]:
        """The result of all ranks, and the seconds since the selftest began."""
        mine = None
        try:
            mine = self._run(check, seconds)
            if mine.status is Status.PASS and self.comm.rank != 0:
                mine = Result(mine.status, mine.reason, mine.remedy)  # the figures of rank 0 are enough
            gathered = self.comm.allgather_obj([time.monotonic() - self.begun, to_data(mine)])
        except CommunicationError as error:
            self.broken = error
            self.own = mine if mine is not None and mine.status is Status.FAIL else None
            words = f"{self.own.reason}; then {error}" if self.own else str(error)
            ranks = f"look at {_places(error.missing)}" if error.missing else "look at the messages of all ranks"
            return failed(words, f"{ranks}; docs/failures.md explains the message"), time.monotonic() - self.begun
        return together([from_data(data) for _, data in gathered]), max(seconds for seconds, _ in gathered)

    def _run(self, check: Check, seconds: float) -> Result:
        try:
            result = check.run(Trial(self.comm, self.device, seconds, time.monotonic()))
            wait_for(self.device)  # so that an error in a kernel is reported by this check
            return result
        except CommunicationError:
            raise
        except Exception as error:  # noqa: BLE001  whatever it is, it is the result of this check
            words = " ".join(str(error).split())
            return failed(f"{type(error).__name__}: {words[:500]}", REPORT_IT)

    def _is_skipped(self, check: Check) -> bool:
        return check.gpu and self.device.type == "cpu"

    def _no_time(self, elapsed: float) -> Result:
        return skipped(f"no time left: {elapsed:.0f} of {self.seconds:.0f} s have passed", "use more --minutes")


def wait_for(device: torch.device) -> None:
    """Wait until the GPU has finished its work. Returns at once for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _places(ranks: Sequence[int]) -> str:
    return f"the output and the host of rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
