"""`phalanx run`: run a script on several ranks of this host, and replace those that die."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from phalanx.cli.numbers import at_least_one, whole
from phalanx.cli.usage import UsageError, check_environment

EXAMPLES = """examples:
  phalanx run --ranks 4 train.py --epochs 3              4 ranks; the job continues when some of them die
  phalanx run --ranks 4 --replace 10 train.py            starts at most 10 new ranks for those that die
  phalanx run --ranks 4 -m package.train                 a module instead of a file

The script makes its communicator with phalanx.create_communicator(elastic=True): docs/elastic.md.
"""


def add_to(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "run",
        help="run a script on ranks that may die",
        description="Run a Python script on several ranks of this host. Ranks that die are replaced, and the others continue.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", metavar="N", type=at_least_one, required=True, help="processes to start")
    parser.add_argument(
        "--replace", metavar="K", type=whole(0), default=0, help="start at most K new ones for those that die (default: 0)"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT", help="a Python file")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="arguments of the script")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Start the ranks and wait for them."""
    check_environment()
    if not args.module and not Path(args.script).is_file():
        raise UsageError(f"{args.script}: there is no such file")
    from phalanx.comm.elastic.supervisor import Supervisor

    command = ["-m", args.script] if args.module else [args.script]
    return Supervisor(args.ranks, [*command, *args.arguments], args.replace).run()
