"""Training steps and all-reduces on emulated hosts, to hold the planner against: every algorithm, several groups, gossip.

    python benchmarks/plan_lab.py --rows FILE [--seconds 110]        needs root (docs/lab.md); goes on where FILE ends
    python benchmarks/plan_lab_check.py --rows FILE                  predicted beside measured

A step computes by waiting (`phalanx bench gossip` does the same), so that two cores can stand for eight devices; its gradients,
its groups, its optimizer and every byte on the network are real. The wait takes about as long as the bytes, which is where
overlap matters most. On a virtual machine the cores are taken away now and then: what was measured meanwhile is measured again.
Without delay the network is the kernel's bridge with token buckets, with delay the lab's switch.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks.* also when run as a script

from benchmarks.lab import Bridge, Lab, LabError, Switch, quantity

from phalanx.cluster import Cluster, Link
from phalanx.cluster.candidates import FAMILIES, Algorithm, algorithms

MIB = 1 << 20
WARM = 3  # the first step only learns the groups; then the connections find their windows
BLOCKS, CALLS = 5, 9  # repetitions of a step, and of an all-reduce alone
TRIES, PAUSE = 4, 2.0  # as many times, and seconds between them, if the machine's own host takes its cores away
QUIET = 0.01  # of the cores' time may be taken away from a repetition that counts
GOSSIP_BLOCKS, GOSSIPS = 3, 9  # and steps of each: several periods, for the partners of ranks that share a host are drawn by lot
DEADLINE = 600.0  # seconds of one network


@dataclass(frozen=True, slots=True)
class Network:
    """Hosts, ranks on each, rate and delay of the lab, and the MiB of the model that is trained there."""

    hosts: int
    per_host: int
    rate: str
    delay: str
    mib: int

    @property
    def bytes_per_second(self) -> float:
        return Lab(self.hosts, self.per_host, self.rate, self.delay).bits_per_second / 8

    @property
    def nbytes(self) -> int:
        return self.mib * MIB

    @property
    def compute(self) -> float:
        """Seconds that forward and backward wait: about what the bytes of a torus take."""
        return max(0.05, 2 * (1 - 1 / self.hosts) * self.nbytes / self.bytes_per_second)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of the all-reduces that are measured alone."""
        return tuple(dict.fromkeys((MIB, self.nbytes)))

    @property
    def groups(self) -> tuple[int, ...]:
        """Bytes of a group: all gradients together, and a quarter of them where that is a MiB."""
        return tuple(dict.fromkeys((self.nbytes, max(MIB, self.nbytes // 4))))

    def schedules(self) -> list[Algorithm]:
        """Every algorithm, a torus on the grid of the hosts alone."""
        grid = f"torus:{self.hosts}x{self.per_host}"
        return [a for a in algorithms(self.cluster(), FAMILIES) if not a.gossips and (a.family != "torus" or a.name == grid)]

    def cluster(self) -> Cluster:
        """The lab as the planner sees it; of a rate TCP carries 0.956 (docs/lab.md), and half a round trip takes 50 us."""
        link = Link(50e-6 + quantity(self.delay, {"ms": 1e-3}), 0.956 * self.bytes_per_second)
        name = f"lab {self.hosts}x{self.per_host} {self.rate} {self.delay}"
        return Cluster(name, self.hosts, self.per_host, Link(5e-6, 44e9), link, shared="host")


NETWORKS = (
    Network(4, 2, "500mbit", "0ms", 8),
    Network(8, 1, "200mbit", "2ms", 4),
    Network(2, 1, "2gbit", "0ms", 64),
    Network(4, 1, "200mbit", "5ms", 4),
    Network(2, 2, "1gbit", "0ms", 16),
    Network(3, 1, "300mbit", "0ms", 8),
    Network(2, 1, "100mbit", "1ms", 4),
    Network(4, 1, "1gbit", "0ms", 16),
    Network(2, 2, "50mbit", "5ms", 1),
    Network(4, 2, "100mbit", "1ms", 2),
    Network(2, 4, "500mbit", "0ms", 8),
    Network(4, 2, "50mbit", "0ms", 1),
    Network(3, 2, "200mbit", "1ms", 4),
    Network(8, 1, "100mbit", "0ms", 2),
)


Block = tuple[float, int]  # seconds of a step or an all-reduce, and ticks that the machine's cores were taken away meanwhile


def stolen() -> int:
    """Ticks of 10 ms that all cores together wanted to run and the machine's own host did not let them."""
    return int(Path("/proc/stat").read_text().split(None, 9)[8])


def quiet(block: Block) -> bool:
    """Whether it was left its cores."""
    seconds, ticks = block
    return 0.01 * ticks <= QUIET * seconds * (os.cpu_count() or 1)


# ---- in a rank ---------------------------------------------------------------------------------------------------------------


def play(network: Network) -> Iterator[dict[str, Any]]:
    """All rows of a network: of every algorithm its all-reduces and steps, then gossip; the slowest rank counts."""
    import torch

    import phalanx
    from phalanx.bench.gossip import Emulated
    from phalanx.grad.allreduce import AllReduce
    from phalanx.grad.gossip import Gossip

    torch.set_num_threads(1)
    with phalanx.create_communicator() as world:

        def timed(what: Callable[[], Any], *, blocks: int = BLOCKS, steps: int = 1, together: bool = True) -> list[Block]:
            """`blocks` of which little or least was stolen. Gossip's do not begin `together`: what a barrier's messages wait
            behind, the exchange under way, would have that time for nothing."""
            for _ in range(WARM):
                what()
            found: list[Block] = []
            for _ in range(TRIES):
                missing = blocks - sum(map(quiet, found))  # all ranks have found the same
                if missing and found:
                    time.sleep(PAUSE)
                    what()  # what was under way has had the pause for it
                mine = []
                for _ in range(missing):
                    if together:
                        world.barrier()
                    before, begun = stolen(), time.perf_counter()
                    for _ in range(steps):
                        what()
                    mine.append((time.perf_counter() - begun, stolen() - before))
                found += [(max(s for s, _ in own), max(t for _, t in own)) for own in zip(*world.allgather_obj(mine))]
            found.sort(key=lambda block: block[1] / block[0])
            return [(seconds / steps, ticks) for seconds, ticks in found[:blocks]]

        def row(what: str, algorithm: str, found: list[Block], **more: Any) -> dict[str, Any]:
            times, ticks = zip(*found)
            seconds = statistics.median(times)
            return {"what": what, "algorithm": algorithm, **more, "seconds": seconds, "times": times, "stolen": ticks}

        def step(comm: Any, **options: Any) -> Callable[[], None]:
            model = Emulated(network.nbytes, network.compute, seed=world.rank)
            plain = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
            opt = phalanx.create_multi_node_optimizer(plain, comm, **options) if options else plain

            def once() -> None:
                opt.zero_grad()
                model(torch.ones((), requires_grad=True)).backward()
                opt.step()

            return once

        yield row("step", "none", timed(step(world)))
        for algorithm in network.schedules():
            schedule = algorithm.make(0)
            with phalanx.create_communicator(schedule) as comm:
                for size in network.sizes:
                    x = comm.buffer(size // 4).zero_()
                    collective = partial(comm.run, schedule, x)
                    yield row("all-reduce", algorithm.name, timed(collective, blocks=CALLS), nbytes=size)
                for size in network.groups:
                    once = step(comm, sync=AllReduce(overlap=True, fused=False), bucket_bytes=size)
                    yield row("step", algorithm.name, timed(once), group_bytes=size)
        for level in ("rank", "host") if network.per_host > 1 else ("rank",):
            once = step(world, sync=Gossip(level=level, patience=60.0))
            name = f"gossip{'-hosts' if level == 'host' else ''}"
            yield row("step", name, timed(once, blocks=GOSSIP_BLOCKS, steps=GOSSIPS, together=False))


# ---- outside -----------------------------------------------------------------------------------------------------------------


def measure(network: Network) -> list[dict[str, Any]]:
    """The rows of `network`, each with it; those that it had in time, if it takes too long."""
    lab = Lab(network.hosts, network.per_host, network.rate, network.delay)
    command = [sys.executable, __file__, "--play", json.dumps(asdict(network))]
    with lab.up(Switch if lab.seconds else Bridge) as net:
        ranks = net.start(command)
        try:
            net.wait(ranks, deadline=DEADLINE)
        except LabError as error:
            print(str(error).splitlines()[0], file=sys.stderr)
        lines = ranks[0].output().splitlines()
    return [{**asdict(network), **json.loads(line)} for line in lines if line.startswith("{") and line.endswith("}")]


def head() -> dict[str, Any]:
    import torch

    return {
        "config": {
            "verb": "plan_lab",
            "warm": WARM,
            "blocks": BLOCKS,
            "calls": CALLS,
            "gossips": [GOSSIP_BLOCKS, GOSSIPS],
            "tries": TRIES,
            "quiet": QUIET,
        },
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=Path(__file__).parent / "results" / "plan_lab.jsonl")
    parser.add_argument("--seconds", type=float, default=110.0, help="begin no other network after so long")
    parser.add_argument("--play", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.play:
        for row in play(Network(**json.loads(args.play))):
            if os.environ["RANK"] == "0":
                print(json.dumps(row), flush=True)
        return
    begun = time.monotonic()
    known = [json.loads(line) for line in args.rows.read_text().splitlines()] if args.rows.exists() else []
    fields = tuple(asdict(NETWORKS[0]))
    done = {tuple(row[name] for name in fields) for row in known if "hosts" in row}
    with args.rows.open("a", encoding="utf-8") as file:
        if not known:
            file.write(json.dumps(head()) + "\n")
        for network in NETWORKS:
            if tuple(asdict(network).values()) in done or time.monotonic() - begun > args.seconds:
                continue
            rows = measure(network)
            file.write("".join(json.dumps(row) + "\n" for row in rows))
            file.flush()
            print(f"{network}: {len(rows)} rows, {time.monotonic() - begun:.0f} s since the begin", flush=True)


if __name__ == "__main__":
    main()
