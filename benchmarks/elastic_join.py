"""How long does a replacement take, and how long do the others stand still for it? ResNet-50 with momentum: 205 MB of state.

    python benchmarks/elastic_join.py [--joins 5] [--spares 1] [--json FILE]

A job of `phalanx run --ranks 2`. Its second rank ends itself, and another one is started. A row has the seconds from the moment
when the new process has imported torch to the end of its first step, the seconds that the other rank stood still while it joined,
and the seconds that the same tensors take between the two ranks, sent with the same verbs and nothing else. `after_death` are the
seconds from the end of the old process to the end of the first step of the new one. `first_optimizer` are those in which torch
makes its first optimizer: it imports its compiler there.

With `--spares 1` the replacement is a process that has imported torch before. `takes_part` then begins when it runs the script.
Each rank waits until the next spare is ready before it ends itself.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

IMPORTED = time.time()
READY = 14.0  # seconds in which the next spare starts and imports

import phalanx  # noqa: E402


def rank(directory: Path, joins: int, spares: int) -> None:
    warnings.simplefilter("ignore")
    comm = phalanx.create_communicator(elastic=True, timeout=60, min_ranks=2)
    joined = comm.is_new
    torch.manual_seed(0)
    model = phalanx.models.resnet50()
    begun = time.perf_counter()
    inner = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    first_optimizer = time.perf_counter() - begun
    opt = phalanx.create_multi_node_optimizer(inner, comm, bucket_bytes=8 << 20)
    opt.share(model=model)
    x, y = torch.randn(2, 3, 64, 64), torch.randint(1000, (2,))

    def step() -> None:
        opt.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        opt.step()

    step()
    first = time.time()
    if comm.member == 0:  # outlives all others
        done = 0
        while done < joins:
            step()
            changes = [change for change in opt.membership.history if change.joined]
            if len(changes) > done:
                done = len(changes)
                step()
                step()
                tensors = [p.detach() for p in model.parameters()] + [s["momentum_buffer"] for s in opt.state.values()]
                comm.barrier()
                begun = time.perf_counter()
                for each in tensors:
                    comm.send(each, 1)
                comm.barrier()
                wire = time.perf_counter() - begun
                row = {"stall": changes[-1].seconds, "wire": wire, "bytes": sum(each.nbytes for each in tensors)}
                (directory / f"stall{done}.json").write_text(json.dumps(row))
                comm.barrier()
        comm.close()
        return
    if joined:
        number = len(list(directory.glob("join*.json"))) + 1
        step()  # the first rank sees the change after its own
        comm.barrier()
        for _ in range(2 * sum(1 for _ in model.parameters())):
            comm.recv(0)
        comm.barrier()
        row = {"takes_part": first - IMPORTED, "first_optimizer": first_optimizer}
        row["after_death"] = first - float((directory / "death").read_text())
        (directory / f"join{number}.json").write_text(json.dumps(row))
        comm.barrier()
    if spares and len(list(directory.glob("join*.json"))) < joins:
        time.sleep(READY)
    (directory / "death").write_text(str(time.time()))
    os._exit(9)  # another one is started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--joins", type=int, default=5)
    parser.add_argument("--spares", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.rank:
        return rank(Path(args.rank), args.joins, args.spares)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the job ends with this program
    rows: list[dict[str, Any]] = [
        {
            "kind": "config",
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "ranks": 2,
            "spares": args.spares,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
    ]
    with tempfile.TemporaryDirectory() as place:
        spares = ["--spares", str(args.spares)]
        command = [sys.executable, "-m", "phalanx", "run", "--ranks", "2", "--replace", str(args.joins), *spares, __file__]
        subprocess.run(
            [*command, "--joins", str(args.joins), *spares, "--rank", place],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            timeout=230,
            check=False,
            stderr=subprocess.DEVNULL,
        )
        for path in sorted(Path(place).glob("stall*.json")):
            row = json.loads(path.read_text())
            other = Path(place) / path.name.replace("stall", "join")
            more = json.loads(other.read_text()) if other.exists() else {}
            rows.append({"kind": "join", "stall_to_wire": row["stall"] / row["wire"]} | row | more)
            print(json.dumps(rows[-1]))
    found = [row for row in rows if row["kind"] == "join"]
    if found:
        summary = {
            name: statistics.median([row[name] for row in found if name in row])
            for name in ("takes_part", "first_optimizer", "after_death", "stall", "wire", "stall_to_wire")
        }
        rows.append({"kind": "median", "spares": args.spares, "joins": len(found)} | summary)
        print(json.dumps(rows[-1]))
    if args.json:
        with args.json.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return None


if __name__ == "__main__":
    main()
