"""`phalanx`: finds the verb, runs it, and turns errors into one line and an exit code: 0 success, 1 failed, 2 wrong usage."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import phalanx
from phalanx.cli import bench, export, pack, plan, report, show, show_lr, train, verify
from phalanx.cli.names import UsageError
from phalanx.schedule import ScheduleError

VERBS = (train, report, show_lr, plan, bench, show, verify, pack, export)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (by default that of the process) and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="phalanx",
        description="Massively distributed data-parallel training, on collective algorithms that are values.",
        epilog="`phalanx VERB --help` explains a verb, with examples.",
    )
    parser.add_argument("--version", action="version", version=f"phalanx {phalanx.__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for verb in VERBS:
        verb.add_to(verbs)
    try:
        args = parser.parse_args(argv)
    except SystemExit as leaving:  # argparse has said what was wrong, or printed the help
        return leaving.code if isinstance(leaving.code, int) else 2
    try:
        return int(args.run(args))
    except UsageError as error:
        print(f"phalanx: {error}", file=sys.stderr)
        return 2
    except ScheduleError as error:
        print(f"phalanx: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader, `head` for one, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
