"""Is a flipped bit found? Random bits of weights and of optimizer state flip on a random rank, at a random step.

    python benchmarks/silent_corruption.py [--flips 20] [--clean 10000] [--every 10] [--json FILE]

Ranks are threads. Each row of kind `flip` says which bit flipped, and after how many steps the rank was named. A flip that the
next update rounds away leaves all ranks equal again: such a row says `gone`. The row of kind `clean` counts false alarms in a run
without flips. The row of kind `cost` has the seconds of one comparison of ResNet-50 with its momentum, on one rank.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import random
import time
import warnings
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import phalanx
from phalanx.grad.drift import bit_sums

torch.manual_seed(0)
MODEL = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
RULES = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-3),
}


def build(rule: str, comm: Any, every: int, policy: str) -> tuple[torch.nn.Module, Any]:
    model = copy.deepcopy(MODEL)
    sync = phalanx.AllReduce(check_every=every, on_difference=policy)
    return model, phalanx.create_multi_node_optimizer(RULES[rule](model.named_parameters()), comm, sync=sync)


def step(model: torch.nn.Module, opt: Any, generator: torch.Generator) -> None:
    x = torch.randn(8, 16, generator=generator)
    opt.zero_grad()
    torch.nn.functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
    opt.step()


def flip(x: torch.Tensor, element: int, bit: int) -> None:
    """Flip one bit of a float32."""
    word = x.detach().view(-1).view(torch.int32)
    word[element] ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int64).to(torch.int32)


def flipped(comm: Any, seed: int, every: int, policy: str) -> dict[str, Any]:
    """One run with one flip, on one of the ranks."""
    chosen = random.Random(seed)
    rule, where = chosen.choice(sorted(RULES)), chosen.choice(["weights", "state"])
    at, victim, bit, which = chosen.randrange(5, 40), chosen.randrange(comm.size), chosen.randrange(32), chosen.random()
    model, opt = build(rule, comm, every, policy)
    generator = torch.Generator().manual_seed(comm.rank)
    row = {
        "kind": "flip",
        "seed": seed,
        "rule": rule,
        "where": where,
        "victim": victim,
        "bit": bit,
        "at_step": at,
        "every": every,
    }
    for number in range(1, at + every + 1):
        try:
            step(model, opt, generator)
        except phalanx.ReplicaError as error:
            return row | {"named": f"of rank {victim} differ" in str(error), "after_steps": number - at}
        if opt.differences:
            healed = opt.differences[0]
            equal = len({str(own) for own in comm.allgather_obj(bit_sums(list(model.parameters())).tolist())}) == 1
            return row | {"named": healed.ranks == (victim,), "healed": healed.healed and equal, "after_steps": number - at}
        if number == at and comm.rank == victim:
            state = [x for own in opt.state.values() for x in own.values() if torch.is_tensor(x) and x.dtype == torch.float32]
            tensors = list(model.parameters()) if where == "weights" else state
            x = tensors[int(which * len(tensors))]
            flip(x, int(which * 1e6) % x.numel(), bit)
    # nobody noticed: the flip was rounded away, or turned all ranks to NaN
    sums = comm.allgather_obj(bit_sums([*model.parameters(), *(x for s in opt.state.values() for x in s.values())]).tolist())
    return row | {"named": False, "gone": len({repr(own) for own in sums}) == 1}


def clean(comm: Any, steps: int, every: int, seed: int = 0) -> dict[str, Any]:
    model, opt = build("adam", comm, every, "stop")
    generator = torch.Generator().manual_seed(comm.size * seed + comm.rank)
    alarms = 0
    for _ in range(steps):
        try:
            step(model, opt, generator)
        except phalanx.ReplicaError:  # noqa: PERF203
            alarms += 1
    return {"kind": "clean", "steps": steps, "every": every, "alarms": alarms}


def cost() -> dict[str, Any]:
    model = phalanx.models.resnet50()
    tensors = [p.detach() for p in model.parameters()]
    tensors += [torch.zeros_like(x) for x in tensors]
    times = []
    for _ in range(15):
        begun = time.perf_counter()
        bit_sums(tensors)
        times.append(time.perf_counter() - begun)
    return {"kind": "cost", "tensors": len(tensors), "bytes": sum(x.nbytes for x in tensors), "seconds": sorted(times)[7]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=20)
    parser.add_argument("--clean", type=int, default=10000)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: list[dict[str, Any]] = [
        {
            "kind": "config",
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "ranks": args.ranks,
        }
    ]
    for seed in range(args.flips):
        policy = "heal" if seed % 2 else "stop"
        found.append(phalanx.run_local(args.ranks, lambda comm, s=seed, p=policy: flipped(comm, s, args.every, p), timeout=60)[0])
        print(json.dumps(found[-1]), flush=True)
    found.append(phalanx.run_local(args.ranks, lambda comm: clean(comm, args.clean, args.every), timeout=60)[0])
    found.append(cost())
    for row in found[-2:]:
        print(json.dumps(row))
    if args.json:
        with args.json.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in found)


if __name__ == "__main__":
    main()
