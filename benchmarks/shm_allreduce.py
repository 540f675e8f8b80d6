"""All-reduce among the ranks of one host: the native core on arenas and through its stage, against gloo and the memory's limit.

    python benchmarks/shm_allreduce.py [--ranks 2 4 8] [--kib 4 64 1024 4096 16384 65536] [--blocks 11] [--json FILE]

float32 sums, one thread per rank, called from Python. The contenders take turns in the same processes, in blocks of about 30 ms;
medians over the blocks, of the slowest rank. Three ways of ours:

    arena        back-to-back calls on memory that the team allocated
    arena fresh  every rank rewrites its buffer before every call, as backward does; the time of rewriting alone is subtracted
    staged       an ordinary tensor, which passes through the staging area

`bound` is the memory's limit: every buffer is read once and written once, 2 x ranks x size bytes, at the bandwidth that all cores
together reach when each only scales a buffer of its own in place, with the same kernel on the same kind of memory, of the same
total size; the fastest block counts. (Two and more streams per core can be a little faster than that one: ratios just below 1.)
What others did on the machine during the run is in the first record: below some 10 % of a core the numbers are worth something.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from local_ranks import finish, started

from phalanx import _native
from phalanx.bench.record import processor
from phalanx.native.team import HostTeam

BLOCK = 0.03  # seconds of one timed block
DEADLINE = 900  # seconds for all ranks of one world
CONTENDERS = ("arena", "arena fresh", "staged", "gloo")


# ---- in a rank ---------------------------------------------------------------------------------------------------------------


def seconds_of(team: HostTeam, work: Callable[[], object], calls: int) -> float:
    """Of one call, on this rank, where all begin together."""
    team.barrier()
    begun = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - begun) / calls


def wrong(team: HostTeam, x: torch.Tensor, reduce: Callable[[], object]) -> int:
    """Elements that an all-reduce of predictable whole numbers gets wrong."""
    pattern = torch.arange(x.numel()) % 13
    x.copy_(pattern + team.rank)
    team.barrier()
    reduce()
    return int((x != team.size * pattern + team.size * (team.size - 1) // 2).sum())


def measure(team: HostTeam, size: int, blocks: int, flat: torch.Tensor) -> Iterator[dict[str, Any]]:
    """The rows of one size; all ranks yield the same."""
    count, cores = size // 4, len(os.sched_getaffinity(0))
    shared, own, source = flat[:count], torch.empty(count), torch.zeros(count)
    writers = min(team.size, cores)
    solo = HostTeam.join(dist.HashStore(), 0, 1, timeout=5, name="alone")
    assert solo is not None
    private = solo.allocate(size * team.size // writers if team.rank < writers else 4).view(torch.float32)

    def rewrite() -> None:
        shared.copy_(source)

    def fresh() -> None:
        shared.copy_(source)
        team.all_reduce(shared)

    work: dict[str, Callable[[], object]] = {
        "arena": lambda: team.all_reduce(shared),
        "staged": lambda: team.all_reduce(own),
        "gloo": lambda: dist.all_reduce(own),
        "arena fresh": fresh,
        "rewrite": rewrite,
        "bound": lambda: solo.all_reduce(private, scale=0.5),
    }
    errors = {
        "arena": wrong(team, shared, work["arena"]),
        "arena fresh": 0,  # the same call
        "staged": wrong(team, own, work["staged"]),
        "gloo": wrong(team, own, work["gloo"]),
    }
    shared.zero_()
    own.zero_()
    calls = {}
    for name, call in work.items():
        seconds_of(team, call, 2)
        once = torch.tensor([seconds_of(team, call, 3)], dtype=torch.float64)
        team.all_reduce(once, "max")
        calls[name] = max(1, min(20_000, int(BLOCK / float(once))))
    times: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(blocks):
        for name, call in work.items():
            mine = torch.tensor([seconds_of(team, call, calls[name])], dtype=torch.float64)
            times[name].append(float(team.all_reduce(mine, "max")))
    median = {name: statistics.median(values) for name, values in times.items()}
    median["arena fresh"] -= median["rewrite"]
    bound = min(times["bound"])
    solo.close()
    for name in CONTENDERS:
        yield {
            "ranks": team.size,
            "contender": name,
            "size": size,
            "count": count,
            "type": "float",
            "time_us": median[name] * 1e6,
            "best_us": min(times[name]) * 1e6 if name != "arena fresh" else None,
            "algbw": size / median[name] / 1e9,
            "busbw": size / median[name] / 1e9 * 2 * (team.size - 1) / team.size,
            "wrong": errors[name],
            "times_gloo": median["gloo"] / median[name],
            "times_bound": median[name] / bound,
            "bound_us": bound * 1e6,
            "calls_per_block": calls[name],
            "blocks": blocks,
        }


def rank_main(sizes: list[int], blocks: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    team = HostTeam.join(dist.distributed_c10d._get_default_store(), rank, size, timeout=60, name="bench")
    assert team is not None
    flat = team.allocate(max(sizes)).view(torch.float32)
    for nbytes in sizes:
        for row in measure(team, nbytes, blocks, flat):
            if rank == 0:
                print(json.dumps(row), flush=True)
    team.close()
    dist.destroy_process_group()


# ---- outside -----------------------------------------------------------------------------------------------------------------


def stand_apart() -> bool:
    """A session of its own with a high weight: under autogroup, `nice` protects only within a session."""
    with contextlib.suppress(OSError):
        os.setsid()
    try:
        Path("/proc/self/autogroup").write_text("-15")
    except OSError:
        return False
    return True


def busy_seconds() -> float:
    """What all processors of the machine have worked since boot."""
    fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """What this program and the ranks it has waited for have worked."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def run_world(n: int, sizes: list[int], blocks: int) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, "--rank", "--blocks", str(blocks), "--kib", *(str(size >> 10) for size in sizes)]
    with started(command, n, {"GLOO_SOCKET_IFNAME": "lo"}) as ranks:
        return [json.loads(line) for line in finish(ranks, deadline=DEADLINE)[0].splitlines()]


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| ranks | size | count | type | contender | time (us) | algbw (GB/s) | busbw (GB/s) | #wrong | x gloo | time / bound |",
        "|--:|--:|--:|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    lines.extend(
        f"| {row['ranks']} | {row['size']} | {row['count']} | {row['type']} | {row['contender']} | {row['time_us']:.1f} "
        f"| {row['algbw']:.2f} | {row['busbw']:.2f} | {row['wrong']} | {row['times_gloo']:.1f} | {row['times_bound']:.2f} |"
        for row in rows
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--kib", type=int, nargs="+", default=[4, 64, 1024, 4096, 16384, 65536])
    parser.add_argument("--blocks", type=int, default=11)
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = [kib << 10 for kib in args.kib]
    if args.rank:
        rank_main(sizes, args.blocks)
        return
    apart = stand_apart()
    begun, busy, own = time.monotonic(), busy_seconds(), own_seconds()
    rows = [row for n in args.ranks for row in run_world(n, sizes, args.blocks)]
    lasted = time.monotonic() - begun
    header = {
        "what": "all-reduce on one host",
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "kernels": _native.kernels(),
        "blocks": args.blocks,
        "own_session": apart,
        "cores_used_by_others": round((busy_seconds() - busy - own_seconds() + own) / lasted, 3),
    }
    print(f"# {json.dumps(header)}\n{table(rows)}")
    if args.json:
        args.json.write_text("\n".join(json.dumps(row) for row in [header, *rows]) + "\n")


if __name__ == "__main__":
    main()
