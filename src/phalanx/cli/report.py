"""`phalanx report`: the page of a run anew, or several runs in one page."""

from __future__ import annotations

import argparse
from pathlib import Path

from phalanx.cli.usage import UsageError

EXAMPLES = """examples:
  phalanx report runs/digits                          runs/digits/report.html anew
  phalanx report runs/digits runs/digits-2            report.html here, with both
  phalanx report runs/* --out compared.html
"""


def add_to(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Make `report` known to the command line."""
    parser = verbs.add_parser(
        "report",
        help="make the page of a run, or compare several",
        description="Write report.html from what runs have recorded, ended or not. The file needs no network and no other file.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "directories", metavar="DIR", type=Path, nargs="+", help="of a run, as `phalanx train --out DIR` writes it"
    )
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="what to write (default: report.html in DIR or, for several, in this directory)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the page, and say where it is."""
    from phalanx.train.report import ReportError, write_report

    out = args.out or (args.directories[0] if len(args.directories) == 1 else Path()) / "report.html"
    try:
        write_report(args.directories, out)
    except ReportError as error:
        raise UsageError(str(error)) from None
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise UsageError(f"cannot write {out}: {error.strerror if isinstance(error, OSError) else error}") from None
    print(out)
    return 0
