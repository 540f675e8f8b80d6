"""`phalanx show`: print a schedule as a picture, text, JSON or a trace."""

from __future__ import annotations

import argparse
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from phalanx.cli.usage import UsageError
from phalanx.schedule import lower, lowered_ops, show, to_html, to_json, to_msccl, to_mscclpp, to_text, trace
from phalanx.schedule.limits import MAX_LOWERED
from phalanx.schedule.names import FORMS, find_schedule
from phalanx.schedule.printable import one_line

EXAMPLES = """examples:
  phalanx show torus:2x3                     ranks down, steps across
  phalanx show torus:2x3 --lower             as single messages
  phalanx show tree:16 --trace tree.json     also write a file for chrome://tracing or ui.perfetto.dev
  phalanx show torus:2x4 --html torus.html   a page to play it
  phalanx show ring:4 --lower --text > mine.txt    a file to edit, then: phalanx verify mine.txt
"""


def add_to(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `show` to the command line."""
    parser = verbs.add_parser(
        "show",
        help="draw a schedule",
        description="Draw a schedule: ranks down, steps across.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "schedule", metavar="SCHEDULE", help=f"{FORMS}; or a file: text, JSON, the XML of MSCCL or the JSON of MSCCL++"
    )
    parser.add_argument("--lower", action="store_true", help="show every collective as single messages")
    parser.add_argument("--all", action="store_true", help="show all ranks and steps")
    parser.add_argument("--trace", metavar="FILE", type=Path, help="also write a Chrome trace")
    parser.add_argument("--html", metavar="FILE", type=Path, help="also write a page that plays the schedule")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--text", action="store_true", help="print one line per op, which `phalanx verify` reads")
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--msccl", action="store_true", help="print the XML of MSCCL, for an all-reduce")
    form.add_argument("--mscclpp", action="store_true", help="print an execution plan of MSCCL++, for an all-reduce")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the schedule in the chosen form."""
    s = find_schedule(args.schedule)
    if args.lower:
        if (count := lowered_ops(s)) > MAX_LOWERED:
            raise UsageError(f"{args.schedule}: {count:,} messages, but --lower makes at most {MAX_LOWERED:,}: use fewer ranks")
        s = lower(s)
    forms = ((args.text, to_text), (args.json, to_json), (args.msccl, to_msccl), (args.mscclpp, to_mscclpp))
    form = next((write for chosen, write in forms if chosen), None)
    if form:
        sys.stdout.write(form(s))
    else:
        width = shutil.get_terminal_size((100, 24)).columns
        limits = {"max_ranks": s.world, "max_steps": len(s.steps)} if args.all else {}
        sys.stdout.write(show(replace(s, name=one_line(s.name)), width=width, **limits))
    for path, what, draw in ((args.trace, "trace", trace), (args.html, "page", to_html)):
        if path:
            try:
                path.write_text(draw(s), encoding="utf-8")
            except OSError as error:
                raise UsageError(f"cannot write the {what}: {error}") from None
            print(f"{what}: {path}", file=sys.stderr)
    return 0
