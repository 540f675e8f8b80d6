"""`phalanx synth`: find an all-reduce for a network given as a graph."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from phalanx.cli.numbers import positive, whole
from phalanx.cli.usage import UsageError
from phalanx.cluster.fabric import Fabric, read_fabric
from phalanx.cluster.fabric_links import FabricError
from phalanx.cluster.synth import busiest_link, synthesise
from phalanx.schedule import Schedule, halving_doubling, hierarchical, ring, swing, to_text, torus, tree, verify
from phalanx.schedule.names import read_text
from phalanx.schedule.printable import one_line

MAX_RANKS = 512  # of the search
COMPARED = 256  # ranks; with more, the comparison takes longer than the search
EXAMPLES = """examples:
  phalanx synth --cluster lab.fabric --out lab.txt     then: phalanx verify lab.txt, phalanx show lab.txt --html lab.html
  nvidia-smi topo -m > host.txt; phalanx synth --cluster host.txt
  phalanx train --set comm.algorithm=lab.txt           runs what was found

a fabric, in GB/s each way:
  fabric "two unequal hosts"
  0-3 - s0 : 50
  4-5 - s1 : 50
  s0 - s1 : 10
"""


def add_to(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `synth` to the command line."""
    parser = verbs.add_parser(
        "synth",
        help="find an all-reduce for a network",
        description="Find an all-reduce for a network of ranks, switches and links, prove it, and compare it with the bandwidth"
        " bound and with the algorithms written by hand.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--cluster",
        metavar="FILE",
        required=True,
        help="a fabric, or the output of `nvidia-smi topo -m`, `lstopo` or `ibnetdiscover`",
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="write the schedule there, as text")
    parser.add_argument("--megabytes", metavar="N", type=positive, default=100.0, help="size of the buffer (default: 100)")
    parser.add_argument(
        "--trees", metavar="N", type=whole(1, 1024), help="chunks with a tree each; more balance better (default: by size)"
    )
    parser.add_argument(
        "--pipeline", metavar="N", type=whole(1, 1024), default=4, help="parts of each chunk that follow one another (default: 4)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Search, verify, print the table, write the file."""
    fabric = _read(args.cluster)
    start = time.perf_counter()
    found = synthesise(fabric, trees=args.trees, pipeline=args.pipeline)
    seconds = time.perf_counter() - start
    verify(found.schedule, bitwise=True)
    print(f"{one_line(fabric.name)}: {fabric.ranks} ranks, {len(fabric.switches)} switches, {len(fabric.links)} links")
    rows = [("lower bound", found.bound), (one_line(found.schedule.name), found.seconds_per_byte)]
    if fabric.ranks <= COMPARED:
        rows += sorted(((s.name, busiest_link(s, fabric)) for s in by_hand(fabric.ranks)), key=lambda row: row[1])
    print(f"\n{'busiest link, ' + format(args.megabytes, 'g') + ' MB':34} {'ms':>10} {'x bound':>8}")
    for name, cost in rows:
        ratio = f"{cost / found.bound:8.2f}" if found.bound else "       -"
        print(f"{name[:34]:34} {cost * args.megabytes * 1e9:10.2f} {ratio}")
    s = found.schedule
    print(f"\nproved, with equal bits on all ranks: {len(s.steps)} steps, {s.chunks} chunks; found in {seconds:.2f} s")
    if args.out:
        try:
            args.out.write_text(to_text(s), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write the schedule: {error}") from None
        print(f"schedule: {args.out}", file=sys.stderr)
    return 0


def by_hand(n: int) -> Iterator[Schedule]:
    """The all-reduces of this library that fit `n` ranks."""
    yield from (ring(n), halving_doubling(n), swing(n), tree(n))
    for rows in range(2, n // 2 + 1):
        if n % rows == 0:
            yield torus(rows, n // rows)
            yield hierarchical(rows, n // rows)


def _read(path: str) -> Fabric:
    try:
        fabric = read_fabric(read_text(path))
    except FabricError as error:
        raise UsageError(f"{path}: {error}") from None
    if fabric.ranks > MAX_RANKS:
        raise UsageError(f"{path}: {fabric.ranks} ranks; the search takes at most {MAX_RANKS}")
    return fabric
