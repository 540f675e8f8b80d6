"""`phalanx report`: write the report of a run again, or compare several runs on one page."""

from __future__ import annotations

import argparse
from pathlib import Path

from phalanx.cli.usage import UsageError

EXAMPLES = """examples:
  phalanx report runs/digits                          write runs/digits/report.html again
  phalanx report runs/digits runs/digits-2            write report.html here, with both
  phalanx report runs/* --out compared.html
"""


def add_to(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `report` to the command line."""
    parser = verbs.add_parser(
        "report",
        help="write the report of a run, or compare several runs",
        description="Write report.html from the records of runs, ended or not. The page needs no network and no other file.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "directories", metavar="DIR", type=Path, nargs="+", help="directory of a run, as `phalanx train --out DIR` writes it"
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="file to write (default: report.html in DIR or, for several runs, in this directory)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the page, and print its path."""
    from phalanx.train.report import ReportError, write_report

    out = args.out or (args.directories[0] if len(args.directories) == 1 else Path()) / "report.html"
    try:
        write_report(args.directories, out)
    except ReportError as error:
        raise UsageError(str(error)) from None
    except (OSError, ValueError) as error:  # ValueError: no file can have such a name
        raise UsageError(f"cannot write {out}: {error.strerror if isinstance(error, OSError) else error}") from None
    print(out)
    return 0
