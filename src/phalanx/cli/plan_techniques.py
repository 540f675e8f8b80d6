"""`phalanx plan --techniques`: ways to save bytes between hosts, what each would gain here, and what it does to accuracy."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from phalanx.cli.usage import UsageError
from phalanx.cluster.evidence import Domain, evidence_of
from phalanx.cluster.techniques import Advice, Priced

EVERY, MAY_LOSE = 50, 0.5  # the defaults of --every and --may-lose
SHOWN = 3  # faster ones whose accuracy is not known


def check_techniques(args: argparse.Namespace) -> None:
    """Refuse options that only `--techniques` reads."""
    for name in ("every", "low_rank", "may_lose"):
        if getattr(args, name) is not None and not args.techniques:
            raise UsageError(f"--{name.replace('_', '-')} has no effect without --techniques; add that, or leave it out")


def technique_lines(rows: Sequence[Priced], advice: Advice, domain: Domain | None, may_lose: float) -> Iterator[str]:
    """The table and the recommendation."""
    yield "techniques               between hosts        step  efficiency  accuracy"
    for row in rows:
        mark = ">" if row is advice.best else " "
        if row.seconds is None or row.nbytes is None or row.efficiency is None:
            yield f"{mark} {row.technique.name:24s} not priced: {row.how}"
            continue
        yield (
            f"{mark} {row.technique.name:24s} {row.nbytes / 1e6:8.2f} MB {row.seconds * 1e3:8.1f} ms {row.efficiency:11.1%}"
            f"  {row.accuracy(domain, may_lose)}"
        )
    best = advice.best
    yield f"take      {best.technique.option}: {best.how}. The fastest that loses at most {may_lose:g} points of accuracy"
    for one in advice.rests_on:
        yield f"rests on  {one.text()}"
    if not advice.rests_on:
        yield "rests on  nothing: it computes the same as training without compression"
    if advice.rests_on or advice.faster:
        yield "          Compare accuracies on a short run of your own model before you rely on any of these"
    for row in advice.faster[:SHOWN]:
        yield (
            f"faster    {row.technique.option}, {(best.seconds or 0.0) / (row.seconds or 1.0):.2f} times, but its accuracy is"
            f" {row.accuracy(domain, may_lose)}"
        )
        yield from (f"          known: {one.text()}" for one in evidence_of(row.technique.kind))
