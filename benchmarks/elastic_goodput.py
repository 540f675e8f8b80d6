"""How much of the training survives when a rank dies every 20 s on average? Ours, torchft and torchrun. Needs root.

    python benchmarks/elastic_goodput.py [--seconds 60] [--mtbf 20] [--rounds 1] [--torchft PYTHON] [--json FILE]

4 hosts (network namespaces) of one rank each train the same model, one contender after the other, with the same moments and hosts
of death. Whoever looks after a contender's processes starts another one at once: the agents of `phalanx run`, the agents of
torchrun (all ranks, from a checkpoint of every 10 steps), and this program for torchft, whose lighthouse runs on host 0.

    goodput           rank-steps that count, of those in the same time without deaths (measured before the first one)
    alive             the part of all rank-time in which a process was there and had imported torch
    goodput_of_ideal  goodput / alive: what a job would make that loses nothing but the time in which processes start
    pause             the longest time without a step of anybody, in the 15 s after a death

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
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import itertools

from lab import NETNS, Bridge, Lab, Net

RANK = Path(__file__).parent / "elastic_goodput_rank.py"
HOSTS, CALM, DEADLINE = 4, 8.0, 150.0


class Contender:
    """The processes of one contender, in a directory of its own."""

    def __init__(self, name: str, net: Net, directory: Path, python: str) -> None:
        self.name, self.net, self.directory, self.python = name, net, directory, python
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
        restarting = ["--nnodes", str(HOSTS), "--nproc-per-node", "1", "--max-restarts", "1000", "--rdzv-id", "x"]
        restarting += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:29500", "--local-addr", self.net.lab.address(host)]
        command = {
            "ours": [self.python, "-m", "phalanx", "run", *elastic, *rank],
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
    rate = sum(ranks for at, ranks in steps.values() if calm <= at < begun) / (begun - calm)
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
        "pause_median": round(statistics.median(pauses), 3) if pauses else None,
        "pause_worst": round(max(pauses), 3) if pauses else None,
    }


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
    parser.add_argument("--only", nargs="*", default=["ours", "torchft", "torchrun"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    def write(row: dict[str, Any]) -> None:
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
        }
    )
    for _ in range(args.rounds):
        deaths = plan_deaths(random.Random(time.time_ns()), args.mtbf, args.seconds)
        for name in args.only:
            if name == "torchft" and args.torchft is None:
                continue
            with Lab(hosts=HOSTS, ranks_per_host=1).up(Bridge) as net, tempfile.TemporaryDirectory() as place:
                contender = Contender(name, net, Path(place), args.torchft if name == "torchft" else sys.executable)
                try:
                    write(run(contender, deaths, args.seconds))
                finally:
                    contender.stop()


if __name__ == "__main__":
    main()
