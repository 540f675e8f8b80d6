"""`phalanx run`: run a script on ranks of one host or several, and replace those that die."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from phalanx.cli.numbers import at_least_one, not_negative, whole
from phalanx.cli.spare import spare_command
from phalanx.cli.usage import UsageError, check_environment

EXAMPLES = """examples:
  phalanx run --ranks 4 train.py --epochs 3              4 ranks; the job continues when some of them die
  phalanx run --ranks 4 --replace 10 train.py            starts at most 10 new ranks for those that die
  phalanx run --ranks 4 --replace 10 --spares 1 train.py starts the first of them before a rank dies, so that it joins sooner
  phalanx run --ranks 4 -m package.train                 a module instead of a file

  phalanx run --hosts 3 --meet node0:29400 --ranks 4 train.py       the same on 3 hosts, with the same PHALANX_SECRET: 12 ranks
  srun -N 3 --ntasks-per-node 1 phalanx run --ranks 4 train.py      Slurm says how many hosts there are, and where they meet

The script makes its communicator with phalanx.create_communicator(elastic=True): docs/elastic.md.
"""


def add_to(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "run",
        help="run a script on ranks that may die",
        description="Run a Python script on ranks of one host or several. Ranks that die are replaced, and the others continue.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", metavar="N", type=whole(0), required=True, help="processes to start on this host")
    parser.add_argument(
        "--replace",
        metavar="K",
        type=whole(0),
        default=0,
        help="start at most K new ones on this host for those that die (default: 0)",
    )
    parser.add_argument(
        "--spares",
        metavar="S",
        type=whole(0),
        default=0,
        help="keep S processes on this host that have imported torch, so that replacements join sooner; each takes 300 MB of "
        "memory (default: 0)",
    )
    parser.add_argument(
        "--hosts", metavar="H", type=at_least_one, help="hosts that run this command (default: 1, or as the launcher says)"
    )
    parser.add_argument(
        "--meet", metavar="HOST:PORT", help="where the hosts meet: the address of one of them (default: as the launcher says)"
    )
    parser.add_argument(
        "--wait",
        metavar="SECONDS",
        type=not_negative,
        default=300.0,
        help="how long to wait for hosts that are missing, and for a meeting point that is lost (default: 300)",
    )
    parser.add_argument(
        "--quorum",
        choices=["majority", "none"],
        default="majority",
        help="if hosts fall silent and fewer than half of the ranks are left: wait for more (majority, the default), or continue "
        "(none); the agent that holds the meeting point decides",
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
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # c10d warns at every connection from a host without a name
    from phalanx.comm.elastic.door import find_door
    from phalanx.comm.elastic.supervisor import Supervisor
    from phalanx.comm.launch import LaunchError
    from phalanx.comm.meeting import WrongJobError

    try:
        door = find_door(args.meet, args.hosts)
    except LaunchError as error:
        raise UsageError(str(error)) from None
    if args.ranks == 0 and door.one_host:
        raise UsageError("--ranks 0: a single host needs a rank; an agent without ranks only holds the meeting point of others")
    if args.spares and not args.replace:
        raise UsageError(f"--spares {args.spares}: spare processes replace ranks that die, and --replace K says how often")
    arguments = [*(["-m"] if args.module else []), args.script, *args.arguments]
    waiting = spare_command(arguments)
    try:
        return Supervisor(
            args.ranks, arguments, args.replace, door, args.wait, quorum=args.quorum, spares=args.spares, spare_command=waiting
        ).run()
    except WrongJobError as error:
        raise UsageError(str(error)) from None
