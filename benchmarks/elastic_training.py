"""A script of an elastic job, as a user writes it, which records what happens.

    phalanx run --ranks 4 benchmarks/elastic_training.py DIRECTORY [key=value ...]

Every rank writes what it took before it trains it, and after each step who contributed. `replay` reads all of it and computes the
same training in one process.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import torch

import phalanx

IMPORTED = time.time()
N, FEATURES, CLASSES = 96, 12, 5
SLOW = 0.6  # seconds between two steps while `slow_file` exists


def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(N, FEATURES, generator=generator)
    return x, torch.randint(CLASSES, (N,), generator=generator), torch.arange(N)


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 32), torch.nn.Tanh(), torch.nn.Linear(32, CLASSES))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def sync_of(options: dict[str, str]) -> phalanx.AllReduce | phalanx.Gossip | phalanx.LocalSGD | phalanx.DiLoCo:
    """The option `sync=`: a kind, and for local steps after a colon how many."""
    kind, _, every = options.get("sync", "allreduce").partition(":")
    if kind == "gossip":
        return phalanx.Gossip(overlap=every != "waiting", exchange="gradients" if every == "gradients" else "weights")
    if kind == "local":
        return phalanx.LocalSGD(every=int(every))
    if kind in ("diloco", "noloco"):
        return phalanx.DiLoCo(
            every=int(every), outer={"lr": 0.7, "momentum": 0.5}, partners="all" if kind == "diloco" else "random"
        )
    return phalanx.AllReduce(overlap={"none": None, "yes": True, "no": False}[options.get("overlap", "none")])


def fingerprint(model: torch.nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:16]


def main(directory: Path, options: dict[str, str]) -> None:
    faulthandler.register(signal.SIGUSR1)  # prints what all threads do: why does a job stand still?
    epochs, pause = int(options.get("epochs", "3")), float(options.get("pause", "0.01"))
    least, timeout = int(options.get("least", "1")), float(options.get("timeout", "30"))
    most = int(options["most"]) if "most" in options else None
    comm = phalanx.create_communicator(elastic=True, timeout=timeout, min_ranks=least, max_ranks=most)
    record = (directory / f"member{comm.member}.jsonl").open("a", buffering=1)

    def write(**row: object) -> None:
        record.write(json.dumps(row | {"member": comm.member, "at": time.time()}) + "\n")

    def exchanged() -> dict[str, object]:
        return {"contributors": comm.contributors, "exchanges": comm.exchanges, "in_flight": comm.in_flight}

    model, inner = build()
    sync = sync_of(options)
    wire = torch.bfloat16 if options.get("wire") else None
    bucket = int(options["bucket"]) if "bucket" in options else None
    delayed = bool(options.get("delayed"))
    opt = phalanx.create_multi_node_optimizer(inner, comm, sync=sync, wire=wire, bucket_bytes=bucket, double_buffering=delayed)
    loader = phalanx.data.Loader(
        data(), comm, batch=int(options.get("batch", "24")), last="keep", on_change=options.get("policy", "keep_batch"), workers=0
    )
    opt.on_membership_change(lambda opt, membership: write(kind="hook", step=opt.steps, epoch=membership.epoch))
    opt.share(model=model, loader=loader)
    write(kind="start", step=opt.steps, pid=os.getpid(), rank=comm.rank, size=comm.size, imported=IMPORTED)
    stop, slow = Path(options.get("stop_file", "/nonexistent")), Path(options.get("slow_file", "/nonexistent"))
    over = False
    while loader.position.epoch < epochs and not over:
        for x, y, ids in loader:
            write(
                kind="took",
                step=opt.steps,
                epoch=comm.membership.epoch,
                ids=ids.tolist(),
                uneven=loader.world.uneven,
                **exchanged(),
            )
            opt.zero_grad()
            losses = torch.nn.functional.cross_entropy(model(x), y, reduction="none")
            (losses.mean() if len(y) else losses.sum() * 0 + 0 * next(model.parameters()).sum()).backward()
            opt.step()
            write(kind="step", step=opt.steps - 1, weights=fingerprint(model), **exchanged())
            if pause:
                time.sleep(SLOW if slow.exists() else pause)
        over = bool(comm.all_reduce(torch.tensor([float(stop.exists())]), op="max"))  # the same on all ranks
        write(kind="epoch", position=loader.position.epoch, weights=fingerprint(model), **exchanged())
    if opt.replicas_differ:
        opt.average_()
    loss = torch.nn.functional.cross_entropy(model(data()[0]), data()[1])
    changes = [str(change) for change in opt.membership.history]
    write(
        kind="end",
        steps=opt.steps,
        weights=fingerprint(model),
        changes=changes,
        members=opt.membership.ranks,
        loss=loss.item(),
        **exchanged(),
    )
    comm.close()


# ---- what the records say ------------------------------------------------------------------------------------------------------


def rows(directory: Path) -> list[dict]:
    found = []
    for path in sorted(directory.glob("member*.jsonl")):
        lines = path.read_text().split("\n")
        found += [json.loads(line) for line in lines if line.endswith("}")]
    return found


def uses(records: list[dict]) -> Counter[int]:
    """How often each sample was trained: by ranks that took part in the exchange that the sample waited for.

    All ranks that have seen an exchange must agree on who took part.
    """
    contributors: dict[int, tuple[int, ...]] = {}
    for row in records:
        if "exchanges" in row:
            who = tuple(row["contributors"])
            assert contributors.setdefault(row["exchanges"], who) == who, f"exchange {row['exchanges']}: {who}"
    took = [row for row in records if row["kind"] == "took"]
    return Counter(
        i for row in took if row["member"] in contributors.get(row["exchanges"] + row["in_flight"] + 1, ()) for i in row["ids"]
    )


Made = tuple[list[int], dict[int, list[int]], bool]


def steps_of(records: list[dict], *, delayed: bool = False) -> list[Made]:
    """For each step the contributors, on which all ranks agree, the samples of each, and whether they count by samples.

    `delayed`: by double buffering, so that the next step, or the end of the job, has seen who contributed.
    """
    made: dict[int, set[tuple[int, ...]]] = {}
    taken: dict[int, dict[int, dict]] = {}
    for row in records:
        if row["kind"] == "step" and row["step"] >= delayed:
            made.setdefault(row["step"] - delayed, set()).add(tuple(row["contributors"]))
        elif row["kind"] == "end" and delayed:
            made.setdefault(row["steps"] - 1, set()).add(tuple(row["contributors"]))
        elif row["kind"] == "took":
            taken.setdefault(row["step"], {})[row["member"]] = row
    found = []
    for step in range(max(made) + 1):
        who = made[step]
        assert len(who) == 1, f"step {step} was made by {who}"
        (contributors,) = who
        took = taken[step]
        samples = {member: took[member]["ids"] for member in contributors}
        found.append((list(contributors), samples, took[contributors[0]]["uneven"]))
    return found


def replay(steps: list[Made], *, delayed: bool = False) -> str:
    """The fingerprint of the weights after the same steps in one process, added up in rank order as the native core does.

    `delayed`: every step applies the mean of the one before it.
    """
    model, opt = build()
    x, y, _ = data()
    before: list[torch.Tensor | None] | None = None
    usual: torch.Tensor | None = None  # as in grad/weights.py: the sum of weights of the last step that had some
    for contributors, took, weighted in steps:
        everything = torch.tensor(float(sum(len(took[member]) for member in contributors)), dtype=torch.float64)
        usual = everything if weighted and usual is None else usual
        total = [torch.zeros_like(p) for p in model.parameters()]
        for number, member in enumerate(contributors):
            ids = torch.tensor(took[member], dtype=torch.int64)
            opt.zero_grad()
            losses = torch.nn.functional.cross_entropy(model(x[ids]), y[ids], reduction="none")
            (losses.mean() if len(ids) else losses.sum()).backward()
            for sum_, p in zip(total, model.parameters()):
                if weighted:
                    p.grad.mul_(len(ids) / usual)
                sum_.copy_(p.grad if number == 0 else sum_ + p.grad)
        for sum_, p in zip(total, model.parameters()):
            p.grad = sum_.mul_(usual / everything) if weighted else sum_ * (1 / len(contributors))
        usual = everything if weighted else usual
        if not delayed:
            opt.step()
            continue
        mean = [p.grad for p in model.parameters()]
        if before is not None:
            for p, grad in zip(model.parameters(), before):
                p.grad = grad
            opt.step()
        before = mean
    return fingerprint(model)


if __name__ == "__main__":
    main(Path(sys.argv[1]), dict(word.split("=", 1) for word in sys.argv[2:]))
