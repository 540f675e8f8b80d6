"""`phalanx`: finds the verb, runs it, and turns errors into one line and an exit code: 0 success, 1 failed, 2 wrong usage."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from typing import NoReturn

import phalanx
from phalanx.cli import bench, export, pack, plan, report, run, selftest, show, show_lr, synth, train, verify
from phalanx.cli.terminal import OutputError, give_up_output, guarded, tell
from phalanx.cli.usage import UsageError
from phalanx.schedule import ScheduleError
from phalanx.schedule.names import InputError

VERBS = (train, run, report, show_lr, plan, bench, selftest, show, verify, synth, pack, export)


class OneLineParser(argparse.ArgumentParser):
    """Prints errors in one line that points to the help, instead of a page of usage."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (usage: {self.prog} --help)")


@functools.cache
def build_parser() -> argparse.ArgumentParser:
    """The whole command line, with all its verbs."""
    parser = OneLineParser(
        prog="phalanx",
        description="Data-parallel training on many hosts. Every collective algorithm is a value that you can print and prove.",
        epilog="`phalanx VERB --help` explains a verb, with examples. "
        "Exit codes: 0 success, 1 failed, 2 wrong usage or input, 128 + N ended by signal N.",
    )
    parser.add_argument("--version", action="version", version=f"phalanx {phalanx.__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for verb in VERBS:
        verb.add_to(verbs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (by default that of the process) and return its exit code."""
    with guarded():
        try:
            code = _run(sys.argv[1:] if argv is None else list(argv))
            sys.stdout.flush()
            return code
        except OutputError as error:
            if not error.reader_left:
                tell(error)
            give_up_output()
            return 1
        except KeyboardInterrupt:
            tell("interrupted")
            return 130


def _run(argv: list[str]) -> int:
    try:
        if any("\0" in word for word in argv):  # no shell passes one, and each of Python's calls has a different error for it
            raise UsageError("an argument holds a NUL character, which no file or setting has")
        if not argv:  # no verb is wrong usage; the help lists the verbs
            build_parser().print_help(sys.stderr)
            return 2
        try:
            args = build_parser().parse_args(argv)
        except SystemExit as leaving:  # argparse has printed the help or the version
            return leaving.code if isinstance(leaving.code, int) else 2
        return int(args.run(args))
    except (InputError, ScheduleError) as error:  # a wrong schedule is wrong input
        tell(error)
        return 2
    except OSError as error:  # verbs do not handle these themselves: a full disk, a file that is gone
        tell(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else error)
        return 1
    except MemoryError:
        tell("not enough memory")
        return 1


if __name__ == "__main__":
    sys.exit(main())
