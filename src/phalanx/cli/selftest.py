"""`phalanx selftest`: check this installation and these machines, on the ranks of a launcher or on ranks started here."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.cli.numbers import at_least_one, number
from phalanx.cli.terminal import tell
from phalanx.cli.usage import UsageError, check_environment
from phalanx.comm.launch import Launch, LaunchError, discover
from phalanx.comm.start import HANDLED, end_with_agent, start_ranks
from phalanx.schedule.names import InputError

if TYPE_CHECKING:  # torch takes seconds to import, and `phalanx --help` does not need it
    from phalanx.selftest.all_checks import Selftest
    from phalanx.selftest.result import Outcome

RANKS = 2
MAX_RANKS = 256  # processes started on one machine: a typo should not bring it down
PRINT_WAIT = 2.0  # seconds that the other ranks wait for the one that prints: torchrun ends all ranks when one fails
FOR_CHECKS = 0.9  # of the time; the rest is for starting and stopping processes
minutes = number("a number of minutes from 0.02 to 1440", lambda x: 0.02 <= x <= 1440)

EXAMPLES = """examples:
  phalanx selftest                                       2 ranks on this host, a minute
  phalanx selftest --ranks 8 --json selftest.json        8 ranks, and a file to attach to a bug report
  torchrun --nproc-per-node 8 -m -- phalanx selftest --json selftest.json
  srun --nodes 2 --ntasks-per-node 8 phalanx selftest --minutes 3
"""


def add_to(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "selftest",
        help="check this installation and these machines",
        description="Check placement, every verb, ordering, training, speed and failure, on CPUs and GPUs. Every line says PASS, "
        "FAIL or SKIP. The exit code is 1 if a check fails. docs/gpu.md explains the checks.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--ranks", metavar="N", type=at_least_one, help=f"processes to start here if no launcher did (default {RANKS})"
    )
    parser.add_argument(
        "--minutes", metavar="M", type=minutes, default=1.0, help="time limit; checks that do not fit are skipped (default 1)"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything to FILE, to attach to a bug report")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check on the ranks of a launcher; without one, start local ranks."""
    begun = time.monotonic()
    try:
        launch = discover()
    except LaunchError as error:
        raise UsageError(str(error)) from None
    launched = launch.how != "alone"
    ranks = launch.world if launched else args.ranks or RANKS
    try:
        check_environment()
        if launched and args.ranks not in (None, ranks):
            raise UsageError(f"--ranks {args.ranks}, but {launch.how} started {ranks}: leave --ranks out")
        if not launched and ranks > MAX_RANKS:
            raise UsageError(f"--ranks {ranks}: give a number from 1 to {MAX_RANKS}")
        if args.json and launch.rank == 0:
            check_writable(args.json)
    except InputError:
        if launch.rank != 0:  # rank 0 prints it for all ranks
            return 2
        raise
    if launched or ranks == 1:
        return test_here(args, launch, begun)
    json = ["--json", str(args.json)] if args.json else []
    code = start_ranks(ranks, ["-m", "phalanx", "selftest", "--minutes", str(args.minutes), *json])
    return code if code in (0, 1, 2, *(128 + signal for signal in HANDLED)) else 1  # a dead rank means that the selftest failed


def check_writable(path: Path) -> None:
    """Raise UsageError if the file cannot be written, now rather than after a minute."""
    try:
        if path.is_dir():
            raise UsageError(f"--json {path}: it is a directory; name a file")
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".phalanx-selftest-"):
            pass
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UsageError(f"--json {path}: cannot write there: {reason}") from None


def test_here(args: argparse.Namespace, launch: Launch, begun: float) -> int:
    """Run the selftest as one rank, or as the only one. Returns 1 if a check failed."""
    from phalanx.comm.create import create_communicator
    from phalanx.comm.verdict import CommunicationError
    from phalanx.selftest.all_checks import Selftest
    from phalanx.selftest.facts import find_device

    if launch.how != "alone":
        end_with_agent()
    try:
        comm = create_communicator()
    except (CommunicationError, LaunchError) as error:
        tell(error)
        return 1
    selftest = Selftest(comm, find_device(), FOR_CHECKS * 60 * args.minutes, begun)
    report = Report(selftest, args.json)
    try:
        selftest.run(report.take)
    except CommunicationError as error:  # before the first check
        tell(f"rank {launch.rank}: {error}")
        return 1
    report.end()
    if selftest.broken is None:
        comm.barrier()  # the report is written before a launcher sees the first rank that failed
        comm.close()
    return 1 if selftest.failed or report.lost else 0


class Report:
    """Prints outcomes as they arrive, on one rank, and writes the file at the end."""

    def __init__(self, selftest: Selftest, path: Path | None) -> None:
        self._selftest, self._path = selftest, path
        self._shown = 0
        self.lost = False  # the file could not be written

    def take(self, outcome: Outcome) -> None:
        """Print an outcome."""
        if self._speaks:
            self._show()

    def end(self) -> None:
        """Print the last line and write the file."""
        from phalanx.selftest.render import last_line
        from phalanx.train.rows import write_json

        selftest = self._selftest
        if not self._speaks:
            if selftest.own is not None:
                tell(f"rank {selftest.comm.rank}: {selftest.own.reason}")
            if selftest.broken is not None:
                time.sleep(PRINT_WAIT)
            return
        self._show()
        print(last_line(selftest.outcomes, time.monotonic() - selftest.begun), flush=True)
        if self._path:
            try:
                write_json(self._path, selftest.record())
            except OSError as error:
                self.lost = True
                tell(f"--json {self._path}: cannot write there: {error.strerror or error}")

    @property
    def _speaks(self) -> bool:
        return self._selftest.comm.rank == self._selftest.speaker

    def _show(self) -> None:
        from phalanx.selftest.all_checks import headline
        from phalanx.selftest.render import line

        selftest = self._selftest
        if self._shown == 0:
            print(headline(selftest.comm, selftest.facts, selftest.seconds))
        for outcome in selftest.outcomes[self._shown :]:
            print(line(outcome), flush=True)
        self._shown = len(selftest.outcomes)
