"""Ranks of a benchmark as processes of this machine: started, awaited until a deadline, ended by their ids.

with started([sys.executable, __file__, "--rank"], 8) as ranks:
    words = finish(ranks, deadline=60)
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence

Ranks = list["subprocess.Popen[str]"]


@contextlib.contextmanager
def started(command: Sequence[str], n: int, env: Mapping[str, str] | None = None) -> Iterator[Ranks]:
    """`n` processes that find each other as under torchrun; none of them is left when the block ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = os.environ | {"WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"} | dict(env or {})
    ranks: Ranks = []
    try:
        for r in range(n):
            ranks.append(subprocess.Popen(command, env=shared | {"RANK": str(r)}, stdout=subprocess.PIPE, text=True))
        yield ranks
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()
            rank.stdout.close()  # type: ignore[union-attr]


def lines_of(rank: subprocess.Popen[str], *, deadline: float) -> Iterator[str]:
    """What it prints, line by line as it comes, until it ends; SystemExit after `deadline` seconds."""
    end, rest = time.monotonic() + deadline, b""
    pipe = rank.stdout.fileno()  # type: ignore[union-attr]
    while select.select([pipe], [], [], max(0.0, end - time.monotonic()))[0]:
        chunk = os.read(pipe, 1 << 16)
        if not chunk:
            return
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (line.decode() for line in whole)
    raise SystemExit(f"rank 0 did not end within {deadline:g} s")


def finish(ranks: Ranks, *, deadline: float, may_die: int | None = None) -> list[str]:
    """Standard output of every rank; SystemExit if one fails, other than `may_die`, or `deadline` seconds pass."""
    end = time.monotonic() + deadline
    try:
        words = [rank.communicate(timeout=max(1.0, end - time.monotonic()))[0] for rank in ranks]
    except subprocess.TimeoutExpired:
        late = [r for r, rank in enumerate(ranks) if rank.poll() is None]
        raise SystemExit(f"rank(s) {late} did not end within {deadline:g} s") from None
    if any(rank.returncode for r, rank in enumerate(ranks) if r != may_die):
        raise SystemExit(f"a rank failed: exit codes {[rank.returncode for rank in ranks]}")
    return words
