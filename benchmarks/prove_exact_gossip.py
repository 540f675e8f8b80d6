"""Seconds to prove exact gossip: every round of a period doubly stochastic, and their product the exact mean.

    python benchmarks/prove_exact_gossip.py [--json FILE] [--most 1024]

For all numbers of ranks up to `--most`, in one thread.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

from phalanx.schedule import chain, gossip, gossip_period, verify


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=1024, help="ranks")
    parser.add_argument("--json", type=Path, help="write the record there")
    args = parser.parse_args()
    begun, rounds = time.perf_counter(), 0
    for n in range(1, args.most + 1):
        period = [gossip(n, number, "exact") for number in range(gossip_period(n, "exact"))]
        for one in period:
            verify(one)
        verify(chain(period, goal="mean"))
        rounds += len(period)
    seconds = time.perf_counter() - begun
    row = {
        "what": "proof of exact gossip",
        "most_ranks": args.most,
        "rounds": rounds,
        "seconds": round(seconds, 1),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "processor": platform.machine(),
    }
    print(f"{rounds} rounds of 1 to {args.most} ranks: each doubly stochastic, each period the exact mean, in {seconds:.1f} s")
    if args.json:
        args.json.write_text(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
