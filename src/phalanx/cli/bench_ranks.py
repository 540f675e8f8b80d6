"""Ranks for a benchmark: started here as processes where no launcher did, watched, and ended by their ids."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import IO

from phalanx.cli.bench_config import AllReduceBench, Bench, GossipBench, from_record
from phalanx.cli.bench_cores import pin
from phalanx.cli.bench_table import Record, write_lines
from phalanx.comm.launch import discover
from phalanx.comm.start import Ranks, end_with_agent

GRACE = 3.0  # seconds that the other ranks get after one has failed: they may have more to say
TAIL = 20  # lines shown of a failed rank's output


class RankError(RuntimeError):
    """A rank ended with an error, or the deadline passed. `words` are the last lines that it printed."""

    def __init__(self, message: str, words: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.words = words


def run_ranks(bench: Bench, n: int, deadline: float, take: Callable[[Record], None]) -> None:
    """Run `bench` on `n` ranks of this host and hand each record to `take` as it comes.

    Records come through a pipe of their own. What rank 0 prints is shown, the output of the others only if they fail.
    """
    reading, writing = os.pipe()
    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    task = json.dumps({"verb": bench.verb, **asdict(bench)})
    outputs: list[IO[bytes] | None] = [None, *(tempfile.TemporaryFile() for _ in range(1, n))]  # noqa: SIM115  closed below
    ranks = None
    with os.fdopen(reading, "rb") as rows:
        try:
            arguments = ["-m", "phalanx.cli.bench_ranks", task, str(writing)]
            ranks = Ranks(n, arguments, env=env, outputs=lambda rank: outputs[rank], pass_fds={0: [writing]})
            os.close(writing)
            writing = -1
            _collect(ranks.processes, outputs, rows.fileno(), deadline, take)
        finally:
            if ranks is not None:
                ranks.kill()
            for file in filter(None, outputs):
                file.close()
            if writing >= 0:
                os.close(writing)


def _collect(
    ranks: list[subprocess.Popen[bytes]],
    outputs: list[IO[bytes] | None],
    rows: int,
    deadline: float,
    take: Callable[[Record], None],
) -> None:
    """Hand on records until all ranks have ended; raise when one failed or the deadline, in seconds from now, has passed."""
    end = time.monotonic() + deadline
    patience = end
    rest, open_ = b"", True
    first: list[int] = []  # who failed before the others noticed
    while open_ or any(rank.poll() is None for rank in ranks):
        if open_ and select.select([rows], [], [], 0.1)[0]:
            chunk = os.read(rows, 1 << 16)
            open_ = bool(chunk)
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                take(json.loads(line))
        elif not open_:
            time.sleep(0.05)
        if not first and (first := [r for r, rank in enumerate(ranks) if rank.poll()]):
            patience = min(end, time.monotonic() + GRACE)
        if time.monotonic() > patience:
            break
    failed = first or [r for r, rank in enumerate(ranks) if rank.poll()]
    if failed:
        r = failed[0]
        words = _words(outputs[r])
        where = ": its words are above" if words is None else ":" if words else ", without a word"
        raise RankError(f"rank {r} of {len(ranks)} failed with exit code {ranks[r].poll()}{where}", words or ())
    late = [str(r) for r, rank in enumerate(ranks) if rank.poll() is None]
    if late:
        raise RankError(f"rank(s) {', '.join(late)} of {len(ranks)} did not finish within {deadline:g} s")


def _words(output: IO[bytes] | None) -> list[str] | None:
    """The last lines of a rank; None for one that prints to the screen."""
    if output is None:
        return None
    output.seek(0)
    return output.read().decode(errors="replace").splitlines()[-TAIL:]


# ---- in a rank -----------------------------------------------------------------------------------------------------------------


def measure(bench: Bench, launcher: str) -> Iterator[Record]:
    """Be one rank of the benchmark: its records, the same on all ranks."""
    if bench.pin:
        pin(discover().rank)
    if isinstance(bench, AllReduceBench):
        from phalanx.cli import bench_allreduce

        yield from bench_allreduce.measure(bench, launcher)
    elif isinstance(bench, GossipBench):
        from phalanx.cli import bench_gossip

        yield from bench_gossip.measure(bench, launcher)
    else:
        from phalanx.cli import bench_train

        yield from bench_train.measure(bench, launcher)


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
