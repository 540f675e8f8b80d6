"""How much of the training survives when a rank dies every 20 s on average? Ours, gossip, torchft, torchrun. Needs root.

    python benchmarks/elastic_goodput.py [--seconds 60] [--mtbf 20] [--rounds 1] [--seed 0] [--together] [--spares 0]
        [--torchft PYTHON] [--json FILE]

4 hosts (network namespaces) of one rank each train the same model, one contender after the other or all together, with the same
moments and hosts of death. A process that died is replaced at once: by the agents of `phalanx run`, by those of torchrun (all
ranks, from a checkpoint of every 10 steps), and by this program for torchft, whose lighthouse runs on host 0.

    goodput           rank-steps that count, of those in the same time without deaths (15 s after a death and later)
    alive             the part of all rank-time in which a process was there and had imported torch
    goodput_of_ideal  goodput / alive: what a job would make that loses nothing but the time in which processes start
    pause             the longest time without a step of anybody, in the 15 s after a death
    steps_made_twice  by the same host
    samples_lost      ours: in no step of a whole epoch. Others, which deal no samples: trained, but in no step that counts
    samples_doubled   in two steps of one epoch that count

`--torchft` is the Python of an environment with torchft 0.2; without it, the contender is left out. Rows are appended.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import itertools

from elastic_goodput_rank import SAMPLES, SHARE
from elastic_training import uses
from lab import NETNS, Bridge, Lab, Net

RANK = Path(__file__).parent / "elastic_goodput_rank.py"
HOSTS, CALM, DEADLINE = 4, 15.0, 150.0


class Contender:
    """The processes of one contender, in a directory of its own."""

    def __init__(self, name: str, net: Net, directory: Path, python: str, spares: int) -> None:
        self.name, self.net, self.directory, self.python, self.spares = name, net, directory, python, spares
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._env = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PHALANX_SECRET": secrets.token_hex(16)}
        first = net.lab.address(0)
        if name == "torchft":
            self._env |= {"TORCHFT_LIGHTHOUSE": f"http://{first}:29510", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
            lighthouse = str(Path(python).with_name("torchft_lighthouse"))
            options = ["--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
            self._start("lighthouse", 0, [lighthouse, *options])
        for host in range(net.lab.hosts):
            self.start(host)

    def start(self, host: int) -> None:
        rank, first = [str(RANK), self.name, str(self.directory), str(host)], self.net.lab.address(0)
        elastic = ["--hosts", str(HOSTS), "--meet", f"{first}:29400", "--ranks", "1", "--replace", "1000"]
        elastic += ["--spares", str(self.spares)]
        restarting = ["--nnodes", str(HOSTS), "--nproc-per-node", "1", "--max-restarts", "1000", "--rdzv-id", "x"]
        restarting += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:29500", "--local-addr", self.net.lab.address(host)]
        command = {
            "ours": [self.python, "-m", "phalanx", "run", *elastic, *rank],
            "gossip": [self.python, "-m", "phalanx", "run", *elastic, *rank],
            "torchft": [self.python, *rank],
            "torchrun": [self.python, "-m", "torch.distributed.run", *restarting, *rank],
        }[self.name]
        self._start(str(host), host, command)

    def _start(self, key: str, host: int, command: list[str]) -> None:
        address = self.net.lab.address(host)
        env = self._env | {"OWN_ADDRESS": address, "GLOO_SOCKET_IFNAME": "eth0"}
        # the host's name is its address: torchft sends others to the name, and there is no name server
        named = ["unshare", "--uts", "sh", "-c", f'hostname {address} && exec "$@"', "sh"]
        with (self.directory / "log").open("ab") as log:
            self.processes[key] = subprocess.Popen(
                ["nsenter", f"--net={NETNS / self.net.spaces[host]}", "--", *named, *command],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def look_after(self) -> None:
        if self.name == "torchft":
            for host in range(HOSTS):
                if self.processes[str(host)].poll() is not None:
                    self.start(host)

    def runs(self, pid: int, host: int) -> bool:
        """Whether this is a process of this host: numbers are used again."""
        with contextlib.suppress(OSError):
            return os.stat(f"/proc/{pid}/ns/net").st_ino == os.stat(NETNS / self.net.spaces[host]).st_ino
        return False

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self.processes.values():
                if process.poll() is None:
                    process.send_signal(number)
            for process in self.processes.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(3)

    def rows(self) -> list[dict[str, Any]]:
        found = []
        for path in self.directory.glob("host*.jsonl"):
            found += [json.loads(line) for line in path.read_text().split("\n") if line.endswith("}")]
        return found


def run(contender: Contender, deaths: list[tuple[float, int]], seconds: float) -> dict[str, Any]:
    """Measure `seconds` with deaths, each a moment and a host, after CALM seconds without."""
    wait(contender, lambda rows: len({row["host"] for row in rows if row["kind"] == "step" and row["ranks"] == HOSTS}) == HOSTS)
    time.sleep(2.0)
    calm = time.time()
    pause(contender, CALM)
    begun, killed = time.time(), list[tuple[float, int]]()
    for moment, host in deaths:
        pause(contender, begun + moment - time.time())
        own = [row for row in contender.rows() if row["host"] == host]
        pid = max(own, key=lambda row: row["at"])["pid"]
        if contender.runs(pid, host):  # otherwise it is starting just now
            os.kill(pid, signal.SIGKILL)
            killed.append((time.time(), pid))
    pause(contender, begun + seconds - time.time())
    end = time.time()
    rows = contender.rows()
    steps: dict[int, tuple[float, int]] = {}  # the first time that a step was made, and by how many
    for row in sorted(rows, key=lambda row: row["at"]):
        if row["kind"] == "step":
            steps.setdefault(row["step"], (row["at"], row["ranks"]))
    rate = undisturbed_rate(sorted(steps.values()), calm, [at for at, _ in killed], end)
    made = sum(ranks for at, ranks in steps.values() if begun <= at < end)
    goodput, alive = made / (rate * (end - begun)), alive_part(rows, {pid: at for at, pid in killed}, begun, end)
    moments = sorted(row["at"] for row in rows if row["kind"] == "step")
    pauses = [longest_pause(moments, death, min(death + 15, end)) for death, _ in killed]
    return {
        "kind": "goodput",
        "contender": contender.name,
        "seconds": round(end - begun, 1),
        "deaths": len(killed),
        "rank_steps_per_second_without_deaths": round(rate, 2),
        "rank_steps": made,
        "goodput": round(goodput, 4),
        "alive": round(alive, 4),
        "goodput_of_ideal": round(goodput / alive, 4),
        "steps_made_twice": sum(row["kind"] == "step" for row in rows)
        - len({(r["step"], r["host"]) for r in rows if r["kind"] == "step"}),
        **samples(rows),
        "pause_median": round(statistics.median(pauses), 3) if pauses else None,
        "pause_worst": round(max(pauses), 3) if pauses else None,
    }


def undisturbed_rate(steps: list[tuple[float, int]], begun: float, deaths: list[float], end: float) -> float:
    """Rank-steps per second of steps that all ranks made, at least CALM seconds after a death."""
    quiet = [begun, *(death + CALM for death in deaths)]
    between = list(zip(quiet, [*deaths, end]))
    count, seconds = 0, 0.0
    for (before, _), (at, ranks) in itertools.pairwise(steps):
        if ranks == HOSTS and any(since <= before and at <= until for since, until in between):
            count, seconds = count + ranks, seconds + at - before
    return count / seconds


def samples(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Samples that were lost, and those that count twice."""
    took, steps = ([row for row in rows if row["kind"] == kind] for kind in ("took", "step"))
    if "exchanges" in took[0]:  # a Loader deals them, and ranks that live take over what a dead one has not trained
        used, done = uses(rows), max(row["epoch"] for row in steps)
        counts = [used[i] for i in range(SAMPLES)]
        return {
            "samples_lost": sum(max(0, done - count) for count in counts),
            "samples_doubled": sum(max(0, count - done - 1) for count in counts),
        }
    made: dict[int, set[int]] = {}
    ranks: dict[int, int] = {}
    for row in steps:
        made.setdefault(row["step"], set()).add(row["host"])
        ranks[row["step"]] = max(row["ranks"], ranks.get(row["step"], 0))
    # a rank may die between its step and its record: then more have taken part than have recorded it
    left_out = {(row["step"], row["host"]) for row in took if row["step"] in made and row["host"] not in made[row["step"]]}
    lost = sum(len(made[step]) >= ranks[step] for step, _ in left_out)
    lost += sum(row["kind"] == "healed" for row in rows)
    return {"samples_lost": SHARE * lost, "samples_doubled": 0}  # a step that is made again undoes the first time


def longest_pause(moments: list[float], begun: float, end: float) -> float:
    inside = [begun, *(at for at in moments if begun < at < end), end]
    return max(later - before for before, later in itertools.pairwise(inside))


def alive_part(rows: list[dict[str, Any]], killed: dict[int, float], begun: float, end: float) -> float:
    """Of the time of all ranks, the part in which a process was there, and had imported torch."""
    total = 0.0
    for row in rows:
        if row["kind"] == "ready":
            last = max(other["at"] for other in rows if other["pid"] == row["pid"])
            over = killed.get(row["pid"], end if last > end - 20 else last)  # without a step for so long it has ended
            total += max(0.0, min(over, end) - max(row["at"], begun))
    return total / (HOSTS * (end - begun))


def wait(contender: Contender, found: Callable[[list[dict[str, Any]]], bool]) -> None:
    until = time.monotonic() + DEADLINE
    while not found(contender.rows()):
        if time.monotonic() > until:
            print((contender.directory / "log").read_text(errors="replace")[-4000:], file=sys.stderr)
            raise TimeoutError(f"{contender.name} does not train")
        pause(contender, 0.2)


def pause(contender: Contender, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        contender.look_after()
        time.sleep(min(0.02, max(0.0, until - time.monotonic())))


def plan_deaths(generator: random.Random, mtbf: float, seconds: float) -> list[tuple[float, int]]:
    """Moments with exponential gaps, none in the last seconds, where nobody could see the recovery."""
    found, moment = list[tuple[float, int]](), generator.expovariate(1 / mtbf)
    while moment < seconds - 3:
        found.append((moment, generator.randrange(HOSTS)))
        moment += max(2.0, generator.expovariate(1 / mtbf))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--mtbf", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--torchft", help="the Python of an environment with torchft")
    parser.add_argument("--only", nargs="*", default=["ours", "gossip", "torchft", "torchrun"])
    parser.add_argument("--seed", type=int, default=0, help="of the moments of death and the hosts; plus one in every round")
    parser.add_argument("--together", action="store_true", help="all contenders at the same time, each in a lab of its own")
    parser.add_argument("--spares", type=int, default=0, help="processes that `phalanx run` keeps ready on every host")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    one_at_a_time = threading.Lock()

    def write(row: dict[str, Any]) -> None:
        with one_at_a_time:
            print(json.dumps(row), flush=True)
            if args.json:
                with args.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")

    write(
        {
            "kind": "header",
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "hosts": HOSTS,
            "mtbf": args.mtbf,
            "seed": args.seed,
            "together": args.together,
        }
    )
    names = [name for name in args.only if name != "torchft" or args.torchft]
    if not names:
        parser.error("--only torchft needs --torchft PYTHON")

    def measure(name: str) -> None:
        with Lab(hosts=HOSTS, ranks_per_host=1).up(Bridge) as net, tempfile.TemporaryDirectory() as place:
            contender = Contender(name, net, Path(place), args.torchft if name == "torchft" else sys.executable, args.spares)
            try:
                write({"seed": args.seed + turn, "spares": args.spares, **run(contender, deaths, args.seconds)})
            finally:
                contender.stop()

    for turn in range(args.rounds):
        deaths = plan_deaths(random.Random(args.seed + turn), args.mtbf, args.seconds)
        if args.together:
            with ThreadPoolExecutor(len(names)) as pool:
                list(pool.map(measure, names))
        else:
            for name in names:
                measure(name)


if __name__ == "__main__":
    main()
