"""Local steps of Phalanx and of torchft 0.2 on a slow network: seconds per step, in turns. Needs root (docs/lab.md).

    python benchmarks/local_steps_peers.py --torchft PYTHON [--rate 300mbit] [--turns 3] [--json FILE]

4 hosts of one rank train 24 layers of 1,024 x 1,024, 101 MB, and meet every 20 steps. torchft has no wire of 8 bits for CPUs. Its
fragments are modules, ours are cut by size: here both are quarters of the network. A part is in flight for 4 of torchft's steps,
the most it allows here, and for 5 of ours. Each contender is a job of its own; one job makes PERIODS times 20 steps after the
first 20.

`--torchft` is the Python of an environment with torchft.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

HOSTS, EVERY, PERIODS, PARTS = 4, 20, 3, 4
SIDE, LAYERS, BATCH = 1024, 24, 16
LIGHTHOUSE = 29510
KINDS = ("LocalSGD", "DiLoCo", "DiLoCo, 4 parts, overlapped")
CONTENDERS = [f"{who} {kind}" for kind in KINDS for who in ("phalanx", "torchft")] + ["phalanx DiLoCo, 4 parts, overlapped, Int8"]


# ---- one rank --------------------------------------------------------------------------------------------------------------


def build() -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    quarters = [
        torch.nn.Sequential(*(torch.nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS // PARTS))) for _ in range(PARTS)
    ]
    model = torch.nn.Sequential(*quarters)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def rank(contender: str) -> None:
    """Train, and print the seconds of each period of EVERY steps."""
    torch.set_num_threads(1)
    model, inner = build()
    who, _, kind = contender.partition(" ")
    x = torch.randn(BATCH, SIDE, generator=torch.Generator().manual_seed(int(os.environ["RANK"])))
    with {"phalanx": phalanx_steps, "torchft": torchft_steps}[who](kind, model, inner) as step:
        seconds = []
        for _ in range(1 + PERIODS):
            begun = time.perf_counter()
            for _ in range(EVERY):
                inner.zero_grad()
                model(x).square().mean().backward()
                step()
            seconds.append(time.perf_counter() - begun)
    print(json.dumps(seconds[1:]))


@contextlib.contextmanager
def phalanx_steps(kind: str, model: torch.nn.Sequential, inner: torch.optim.Optimizer) -> Iterator[Callable[[], Any]]:
    import phalanx

    sync = {
        "LocalSGD": phalanx.LocalSGD(every=EVERY),
        "DiLoCo": phalanx.DiLoCo(every=EVERY),
        "DiLoCo, 4 parts, overlapped": phalanx.DiLoCo(every=EVERY, fragments=PARTS, overlap=True),
        "DiLoCo, 4 parts, overlapped, Int8": phalanx.DiLoCo(every=EVERY, fragments=PARTS, overlap=True, wire=phalanx.Int8()),
    }[kind]
    with phalanx.create_communicator() as comm:
        opt = phalanx.create_multi_node_optimizer(inner, comm, sync=sync)
        yield opt.step
        opt.average_()


@contextlib.contextmanager
def torchft_steps(kind: str, model: torch.nn.Sequential, inner: torch.optim.Optimizer) -> Iterator[Callable[[], Any]]:
    from torch.distributed import TCPStore
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo, LocalSGD

    address = os.environ["ADDRESSES"].split()[int(os.environ["RANK"])]
    socket.sethostname(address)  # torchft sends others to the host's name, and there is no name server
    store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    limit = datetime.timedelta(seconds=60)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        min_replica_size=HOSTS,
        use_async_quorum=False,
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        replica_id=f"host{os.environ['RANK']}",
        timeout=limit,
        quorum_timeout=limit,
        init_sync=False,  # all replicas begin equal
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        hostname=address,
    )
    if kind == "LocalSGD":
        sync: Any = LocalSGD(manager, model, inner, sync_every=EVERY)
    else:
        parts = list(model) if "parts" in kind else [model]
        outer = [torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True) for part in parts]
        delay = EVERY // PARTS - 1 if "overlapped" in kind else 0
        sync = DiLoCo(manager, parts, inner, outer, EVERY, fragment_sync_delay=delay, fragment_update_alpha=0.0)
    with sync:
        yield inner.step
    manager.shutdown(wait=False)


# ---- all of them ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def lighthouse(python: str, space: Path, address: str) -> Iterator[None]:
    """torchft's meeting point, on the host with this address."""
    program = str(Path(python).with_name("torchft_lighthouse"))
    options = ["--min_replicas", str(HOSTS), "--quorum_tick_ms", "100", "--join_timeout_ms", "60000"]
    named = ["unshare", "--uts", "sh", "-c", f'hostname {address} && exec "$@"', "sh"]
    process = subprocess.Popen(
        ["nsenter", f"--net={space}", "--", *named, program, *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def turn(net: Any, contender: str, torchft: str, netns: Path) -> list[float]:
    """Seconds of a step in each period, of the slowest rank."""
    theirs = contender.startswith("torchft")
    hosts = [net.lab.address(host) for host in range(HOSTS)]
    env = {"TORCHFT_LIGHTHOUSE": f"http://{hosts[0]}:{LIGHTHOUSE}", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    env["ADDRESSES"] = " ".join(hosts)
    command = ["unshare", "--uts", torchft if theirs else sys.executable, __file__, "--rank", contender]
    with lighthouse(torchft, netns / net.spaces[0], hosts[0]) if theirs else contextlib.nullcontext():
        found = net.run(command, deadline=400, env=env)
    by_rank = [json.loads(words.strip().splitlines()[-1]) for words in found]
    return [max(own) / EVERY for own in zip(*by_rank)]


def version_of_torchft(python: str) -> str:
    words = "import importlib.metadata; print(importlib.metadata.version('torchft'))"
    return subprocess.run([python, "-c", words], stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torchft", help="the Python of an environment with torchft")
    parser.add_argument("--rate", default="300mbit")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--json", type=Path, help="append the records there")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank(args.rank)
        return 0
    if not args.torchft and any(name.startswith("torchft") for name in args.only):
        parser.error("--torchft PYTHON is needed for its contenders")
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from benchmarks.lab import NETNS, Lab

    theirs = version_of_torchft(args.torchft) if args.torchft else None
    times: dict[str, list[float]] = {name: [] for name in args.only}
    with Lab(HOSTS, 1, args.rate).up() as net:
        for _ in range(args.turns):
            for name, own in times.items():
                own += turn(net, name, args.torchft, NETNS)
    medians = {name: statistics.median(own) for name, own in times.items()}
    rows: list[dict[str, Any]] = [
        {
            "what": "seconds per step with local steps",
            "date": time.strftime("%Y-%m-%d"),
            "versions": {"torch": torch.__version__, "kernel": platform.release(), "torchft": theirs},
            "lab": {"hosts": HOSTS, "per_host": 1, "rate": args.rate},
            "parameter_bytes": 4 * SIDE * SIDE * LAYERS,
            "every": EVERY,
            "turns": args.turns,
        }
    ]
    for name, own in times.items():
        peer = medians.get("torchft " + name.partition(" ")[2])
        row = {"contender": name, "rate": args.rate, "step_s": medians[name], "times_torchft": peer and peer / medians[name]}
        rows.append(row | {"steps_s": [round(each, 4) for each in own]})
        print(json.dumps(rows[-1]), flush=True)
    if args.json:
        with args.json.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
