"""Local ranks for a benchmark: started here if no launcher did, read through a pipe, and stopped at the end."""

from __future__ import annotations

import json
import os
import select
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import IO

from phalanx.bench.config import Bench
from phalanx.bench.record import Record
from phalanx.comm.start import Ranks

GRACE = 3.0  # seconds for the other ranks after one has failed: their output may name the cause
TAIL = 20  # lines shown of a failed rank's output


class RankError(RuntimeError):
    """A rank ended with an error, or the deadline passed. `words` are the last lines that the rank printed."""

    def __init__(self, message: str, words: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.words = words


def run_ranks(bench: Bench, n: int, deadline: float, take: Callable[[Record], None]) -> None:
    """Run `bench` on `n` ranks of this host and pass each record to `take` when it arrives.

    Records arrive through a separate pipe. Rank 0's output goes to the screen; another rank's is shown if it fails.
    """
    reading, writing = os.pipe()
    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    task = json.dumps({"verb": bench.verb, **asdict(bench)})
    outputs: list[IO[bytes] | None] = [None, *(tempfile.TemporaryFile() for _ in range(1, n))]  # noqa: SIM115  closed below
    ranks = None
    with os.fdopen(reading, "rb") as rows:
        try:
            arguments = ["-m", "phalanx.bench.rank", task, str(writing)]
            ranks = Ranks(n, arguments, env=env, outputs=lambda rank: outputs[rank], pass_fds={0: [writing]})
            os.close(writing)
            writing = -1
            failed = _collect(ranks, rows.fileno(), deadline, take)
            if failed is not None:
                raise _failure(failed, ranks, outputs[failed])
            if ranks.running:
                late = ", ".join(str(rank) for rank, process in enumerate(ranks.processes) if process.poll() is None)
                raise RankError(f"rank(s) {late} of {n} did not finish within {deadline:g} s")
        finally:
            if ranks is not None:
                ranks.kill()
            for file in filter(None, outputs):
                file.close()
            if writing >= 0:
                os.close(writing)


def _collect(ranks: Ranks, rows: int, deadline: float, take: Callable[[Record], None]) -> int | None:
    """Pass records on until all ranks have ended or `deadline` seconds have passed; return the rank that failed first.

    After a failure, the other ranks have GRACE seconds left.
    """
    end = time.monotonic() + deadline
    rest, open_ = b"", True
    first: int | None = None
    while (open_ or ranks.running) and time.monotonic() <= end:
        if open_ and select.select([rows], [], [], 0.1)[0]:
            chunk = os.read(rows, 1 << 16)
            open_ = bool(chunk)
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                take(json.loads(line))
        elif not open_:
            time.sleep(0.05)
        if first is None and (failed := ranks.failed):
            first = failed[0]
            end = min(end, time.monotonic() + GRACE)
    return first if first is not None else next(iter(ranks.failed), None)


def _failure(rank: int, ranks: Ranks, output: IO[bytes] | None) -> RankError:
    """The error of a failed rank, with its last lines. Those of rank 0 are on the screen already."""
    words: list[str] = []
    if output is not None:
        output.seek(0)
        words = output.read().decode(errors="replace").splitlines()[-TAIL:]
    where = ": see its output above" if output is None else ":" if words else ", without any output"
    return RankError(f"rank {rank} of {len(ranks.processes)} failed with exit code {ranks.processes[rank].poll()}{where}", words)
