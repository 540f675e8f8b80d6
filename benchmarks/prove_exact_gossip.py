"""Seconds to prove exact gossip: the rounds of a period are the exact mean, and each of them is doubly stochastic.

    python benchmarks/prove_exact_gossip.py [--json FILE] [--most 1024]

For all numbers of ranks up to `--most`, in one thread. Seconds are of the processor, so that other work counts as little as it
can; rounds that a period repeats are proved once.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

from phalanx.schedule import chain, gossip, gossip_period, verify
from phalanx.schedule.exact import exact_rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=1024, help="ranks")
    parser.add_argument("--json", type=Path, help="write the record there")
    args = parser.parse_args()
    mean = mixing = 0.0
    rounds = 0
    for n in range(1, args.most + 1):
        begun = time.process_time()
        period = [gossip(n, number, "exact") for number in range(gossip_period(n, "exact"))]
        verify(chain(period, goal="mean"))
        proved = time.process_time()
        different = {tuple(map(id, pairs)): number for number, pairs in enumerate(exact_rounds(n))}
        for number in different.values():
            verify(period[number])
        mean, mixing = mean + proved - begun, mixing + time.process_time() - proved
        rounds += len(period)
    row = {
        "what": "proof of exact gossip",
        "most_ranks": args.most,
        "rounds": rounds,
        "mean_seconds": round(mean, 1),
        "rounds_seconds": round(mixing, 1),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "processor": platform.machine(),
    }
    print(f"1 to {args.most} ranks: every period is the exact mean, {mean:.1f} s; its {rounds} rounds mix, {mixing:.1f} s more")
    if args.json:
        args.json.write_text(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
