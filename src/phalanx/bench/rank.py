"""One rank of a benchmark: `python -m phalanx.bench.rank TASK PIPE`, as ranks.py starts it, or `measure` under a launcher."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator

from phalanx.bench.config import AllReduceBench, Bench, GossipBench, from_record
from phalanx.bench.cores import pin
from phalanx.bench.record import Record
from phalanx.bench.table import write_lines
from phalanx.comm.launch import discover
from phalanx.comm.start import end_with_agent


def measure(bench: Bench, launcher: str) -> Iterator[Record]:
    """Take part in the benchmark and yield its records, which are the same on all ranks."""
    if bench.pin:
        pin(discover().rank)
    if isinstance(bench, AllReduceBench):
        from phalanx.bench import allreduce

        yield from allreduce.measure(bench, launcher)
    elif isinstance(bench, GossipBench):
        from phalanx.bench import gossip

        yield from gossip.measure(bench, launcher)
    else:
        from phalanx.bench import train

        yield from train.measure(bench, launcher)


def _main(task: str, pipe: str) -> None:
    end_with_agent()
    records = measure(from_record(json.loads(task)), "phalanx bench")
    if discover().rank != 0:
        for _ in records:
            pass
    else:
        with os.fdopen(int(pipe), "w", encoding="utf-8") as file:
            write = write_lines(file)
            for record in records:
                write(record)


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2])
