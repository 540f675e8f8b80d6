"""An elastic job on 4 hosts (network namespaces) whose ranks are killed and whose network is cut at random moments. Needs root.

    python benchmarks/elastic_faults.py kills [--repeat 50] [--json FILE]         kill -9 of any rank
    python benchmarks/elastic_faults.py hosts [--repeat 10] [--json FILE]         the death of a host with its agent and ranks
    python benchmarks/elastic_faults.py beats [--json FILE]                       bytes of heartbeats
    python benchmarks/elastic_faults.py cuts [--repeat 20] [--kind 3|1 ...] [--json FILE]

A row of `cuts` says how long it took until the side that continues made its next step (1|3: until it paused), whether the other
side stood still, and how long after the end of the cut all hosts took part again. At the end of each program all records are
compared: every step number was made once, by one set of ranks, which all have the same weights after it. Every sample was trained
equally often. An undisturbed run with the same ranks in every step (elastic_replay.py) ends with the same bits.
Rows are appended, and a program continues where it was stopped. `--warm` forks all processes from one that has imported torch, as
the tests do: 20 s less per repetition, and the same faults.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for every thread of the replay, too: more would round otherwise
import torch

sys.path.insert(0, str(Path(__file__).parent))
from elastic_hosts import Cuts, Fleet, Way, between, fleet
from elastic_kills import DEADLINE, RECENT, kill_one
from elastic_replay import replay_on_hosts
from elastic_training import N, rows, steps_of
from lab import Bridge, Lab

from phalanx.comm.elastic.links import FORGOTTEN

HOLD = 8.0  # seconds that a cut lasts: longer than the 5 s after which ranks without their meeting point stop
FLAP = 10.0  # seconds of a link that comes and goes every second
KINDS: dict[str, tuple[list[Way], set[int]]] = {  # what is cut, and the hosts that continue; host 0 has the meeting point
    "3|1": (between([0, 1, 2], [3]), {0, 1, 2}),
    "2|2": (between([0, 1], [2, 3]), {0, 1}),
    "1|3": (between([0], [1, 2, 3]), {0}),  # it finishes the step that is under way, then pauses
    "one way out": ([(3, 0), (3, 1), (3, 2)], {0, 1, 2}),
    "one way in": ([(0, 3), (1, 3), (2, 3)], {0, 1, 2}),
    "pairwise": ([], set()),  # between two hosts without the meeting point: one of them goes
    "pairwise one way": ([], set()),
    "link down": ([], {0, 1, 2}),
    "flapping": ([], set()),  # nobody has to go
}
PAUSES, PAUSED = {"1|3"}, "training pauses until"  # the side of the meeting point is a minority


def full_world(job: Fleet, since: float) -> float:
    """When ranks of all hosts have made a step together, after `since`."""
    hosts = set(range(job.net.lab.hosts))
    return float(job.follow.wait(lambda records: _step_on(job, records, lambda own: own == hosts, since), "a step of all hosts"))


def _step_on(job: Fleet, records: list[dict[str, Any]], wanted: Any, since: float) -> float | None:
    living = job.living()
    times: dict[tuple[int, ...], dict[int, float]] = {}
    for row in records[-RECENT:]:
        if row["kind"] == "step" and row["at"] > since and set(row["contributors"]) <= living.keys():
            times.setdefault((row["step"], *row["contributors"]), {})[row["member"]] = row["at"]
    done = [max(own.values()) for (_, *who), own in times.items() if own.keys() >= set(who) and wanted({living[m] for m in who})]
    return min(done) if done else None


def cut_once(job: Fleet, cuts: Cuts, kind: str, generator: random.Random) -> dict[str, Any]:
    full_world(job, time.time() - 5)
    time.sleep(FORGOTTEN + 1 + generator.uniform(0, 0.3))  # otherwise the hosts of the last cut wait longer each time
    ways, stay = KINDS[kind]
    pair = used_link(job, generator)
    if kind.startswith("pairwise"):
        ways = between([pair[0]], [pair[1]]) if kind == "pairwise" else [pair]
    at = time.time()
    if kind == "flapping":
        return flap(job, cuts, at)
    if kind == "link down":
        cuts.link(3, "down")
    else:
        cuts.cut(ways)

    def continues(hosts: set[int]) -> bool:
        return hosts == stay if stay else len(hosts) == 3 and not hosts >= set(pair)

    pauses = job.words.count(PAUSED)

    def reacted(records: list[dict[str, Any]]) -> float | None:
        """When it continued. A minority pauses: it may have a step to finish first, or it is between two steps."""
        if kind in PAUSES and job.words.count(PAUSED) > pauses:
            return time.time()
        return _step_on(job, records, continues, at + 0.05)

    done = job.follow.wait(reacted, f"a step after the cut {kind}")
    time.sleep(max(0.0, at + HOLD - time.time()))
    late = [row for row in job.follow.look() if row["kind"] == "step" and row["at"] > at + 1]
    hosts = job.living()
    sides = {tuple(row["contributors"]) for row in late if row["at"] > at + HOLD - 1}
    healed = time.time()
    cuts.link(3, "up") if kind == "link down" else cuts.heal()
    again = full_world(job, healed)
    return {
        "kind": "cut",
        "cut": kind,
        "seconds_to_next_step": round(done - at, 3),
        "worlds_at_the_end_of_the_cut": len(sides),
        "hosts_that_continue": sorted({hosts[m] for side in sides for m in side if m in hosts}),
        "seconds_to_full_world_after_heal": round(again - healed, 3),
    }


def used_link(job: Fleet, generator: random.Random) -> Way:
    """Two hosts that send each other something, without the one of the meeting point: not all of 4 ranks do."""
    hosts = job.living()
    last = next(row for row in reversed(job.follow.rows) if row["kind"] == "step")["contributors"]
    neighbours = [(0, 1), (2, 3), (0, 2), (1, 3)]  # of halving and doubling
    links = [(hosts[last[a]], hosts[last[b]]) for a, b in neighbours]
    return generator.choice([link for link in links if 0 not in link])


def flap(job: Fleet, cuts: Cuts, at: float) -> dict[str, Any]:
    """The link of host 3 goes down and up every second."""
    before, epochs = _steps(job), job.words.count("phalanx: epoch ")
    calm = _steps_in(job, at - 5, at)
    for _ in range(int(FLAP / 2)):
        cuts.link(3, "down")
        time.sleep(1)
        cuts.link(3, "up")
        time.sleep(1)
    made, changes = _steps(job) - before, job.words.count("phalanx: epoch ") - epochs
    healed = time.time()
    again = full_world(job, healed)
    return {
        "kind": "cut",
        "cut": "flapping",
        "seconds": FLAP,
        "steps_of_calm": round(made / max(1.0, calm / 5 * FLAP), 3),
        "changes": changes,
        "seconds_to_full_world_after_heal": round(again - healed, 3),
    }


def _steps(job: Fleet) -> int:
    return max((row["step"] for row in job.follow.look() if row["kind"] == "step"), default=0)


def _steps_in(job: Fleet, since: float, until: float) -> int:
    return len({row["step"] for row in job.follow.look() if row["kind"] == "step" and since < row["at"] < until})


def lose_host(job: Fleet, generator: random.Random) -> dict[str, Any]:
    """Kill the agent and the ranks of a host that has no meeting point, then start it again with the same command."""
    full_world(job, time.time() - 5)
    time.sleep(generator.uniform(0, 0.3))
    host = generator.choice([1, 2, 3])
    pids = {row["member"]: row["pid"] for row in job.follow.starts}
    doomed = [job.agents[host].pid, *(pids[member] for member, place in job.living().items() if place == host)]
    at = time.time()
    for pid in doomed:
        os.kill(pid, signal.SIGKILL)
    job.agents[host].wait()
    others = set(range(4)) - {host}
    done = job.follow.wait(lambda records: _step_on(job, records, lambda own: own == others, at), "a step without the host")
    job.start(host)
    full = full_world(job, at)
    return {
        "kind": "host",
        "host": host,
        "seconds_to_next_step": round(done - at, 3),
        "seconds_to_full_world": round(full - at, 3),
    }


def beats(write: Any, seconds: float = 10.0) -> None:
    """Bytes that leave and reach a host while its rank does nothing but give signs of life."""
    for ranks in (1, 2):
        with Lab(hosts=2, ranks_per_host=ranks).up(Bridge) as net, tempfile.TemporaryDirectory() as place:
            with fleet(net, Path(place), "epochs=1000", "pause=1000", ranks=ranks) as job:
                job.follow.wait(lambda rows: True if any(row["kind"] == "step" for row in rows) else None, "a step")
                time.sleep(2.0)
                before = net.bytes_sent()
                time.sleep(seconds)
                out, back = ((after - old) / seconds for after, old in zip(net.bytes_sent(), before))
            write({"kind": "beats", "ranks_per_host": ranks, "bytes_per_second_sent": round(back), "received": round(out)})


def check(directory: Path) -> dict[str, Any]:
    """What the records say: one lineage, equal weights, samples."""
    records = rows(directory)
    steps = steps_of(records)  # raises if a step was made by two sets of ranks
    weights: dict[int, set[str]] = {}
    for row in records:
        if row["kind"] == "step":
            weights.setdefault(row["step"], set()).add(row["weights"])
    used = Counter(i for _, took, _ in steps for ids in took.values() for i in ids)
    ends = {row["weights"] for row in records if row["kind"] == "end"}
    torch.set_num_threads(1)
    even = not any(uneven for _, _, uneven in steps)  # the replay knows no shares of different size
    return {
        "kind": "check",
        "steps": len(steps),
        "one_lineage": True,
        "weights_equal_after_every_step": all(len(found) == 1 for found in weights.values()),
        "samples_exact": len(used) == N and len(set(used.values())) == 1,
        "equal_to_undisturbed_worlds": ends == {replay_on_hosts(steps)} if even else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kills", "hosts", "cuts", "beats"])
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--kind", choices=KINDS, nargs="*", default=list(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no new fault after this time; run again to continue")
    args = parser.parse_args()
    if args.warm:
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from tests.warm.popen import Python, warm

        warm()
        subprocess.Popen = Python  # type: ignore[misc]
    generator = random.Random(f"{args.seed} {time.time()}")
    done = [json.loads(line) for line in args.json.read_text().splitlines()] if args.json and args.json.exists() else []

    def write(row: dict[str, Any]) -> None:
        done.append(row)
        print(json.dumps(row), flush=True)
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps(row) + "\n")

    until = time.monotonic() + 60 * args.minutes
    todo: list[str] = []
    if args.what == "cuts":
        for kind in args.kind:
            todo += [kind] * (args.repeat - sum(row.get("cut") == kind for row in done))
        generator.shuffle(todo)
    else:
        todo = [args.what] * (args.repeat - sum(row["kind"] == args.what[:-1] for row in done))
    write(
        {
            "kind": "header",
            "what": args.what,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "torch": torch.__version__,
            "machine": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "hosts": 4,
            "ranks_per_host": 1,
            "warm": args.warm,
        }
    )
    if args.what == "beats":
        beats(write)
        return
    with Lab(hosts=4, ranks_per_host=1).up(Bridge) as net, tempfile.TemporaryDirectory() as place:
        directory, cuts = Path(place), Cuts(net)
        with fleet(net, directory, "epochs=1000000", "pause=0.05", f"stop_file={directory / 'stop'}") as job:
            dead: set[int] = set()
            try:
                for what in todo:
                    if time.monotonic() > until:
                        break
                    if what == "kills":
                        write(kill_one(job.follow, dead, generator, 4))
                    elif what == "hosts":
                        write(lose_host(job, generator))
                    else:
                        write(cut_once(job, cuts, what, generator))
                (directory / "stop").touch()
                codes = [agent.wait(DEADLINE) for agent in job.agents.values()]
            except BaseException:
                print(job.explain(), file=sys.stderr)
                raise
        write(check(directory) | {"exit_codes": codes})
    for kind in sorted({row.get("cut") or row["kind"] for row in done if "seconds_to_next_step" in row}):
        seconds = [r["seconds_to_next_step"] for r in done if "seconds_to_next_step" in r and (r.get("cut") or r["kind"]) == kind]
        print(f"{kind}: {len(seconds)} times, median {statistics.median(seconds):.2f} s, worst {max(seconds):.2f} s")


if __name__ == "__main__":
    main()
