"""A rank that trains with every option and tells, as one JSON line, how far it is from one process with the whole batch.

python -m tests.world.programs.train
"""

from __future__ import annotations

import copy
import json
import os
import zlib
from typing import Any

import torch
from tests.optim.oracle import MODEL, alone, create_multi_node_optimizer, flat, loss_of, sgd

import phalanx

STEPS = 4
LARGE = torch.nn.Sequential(
    torch.nn.Linear(20, 400), torch.nn.Tanh(), torch.nn.Linear(400, 400), torch.nn.Linear(400, 3)
).double()
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "groups": {"bucket_bytes": 3000, "sync": phalanx.AllReduce(overlap=True)},
    "growing": {"sync": phalanx.AllReduce(growing=2, overlap=True)},
    "no overlap": {"sync": phalanx.AllReduce(overlap=False, fused=False)},
    "one replica": {},  # of the large model
    "one pass": {"sync": phalanx.AllReduce(fused=True)},  # of the model in float32
    "weighted": {"sync": phalanx.AllReduce(weighted=True)},
    "bfloat16": {"wire": torch.bfloat16},
    "float16": {"wire": torch.float16},
}
MODELS = {"one replica": LARGE, "one pass": copy.deepcopy(MODEL).float()}


def train(model: torch.nn.Module, opt: torch.optim.Optimizer, comm: phalanx.Communicator | None, t: int) -> None:
    opt.zero_grad()
    loss_of(model, comm, t, dtype=next(model.parameters()).dtype).backward()
    opt.step()


def main() -> None:
    told: dict[str, Any] = {}
    with phalanx.create_communicator(timeout=20) as comm:
        for name, options in OPTIONS.items():
            model = copy.deepcopy(MODELS.get(name, MODEL))
            phalanx.bcast_parameters(model, comm)
            wanted = alone(train, steps=STEPS, model=model)[-1]
            opt, before = create_multi_node_optimizer(sgd(model), comm, **options), flat(model)
            for t in range(STEPS):
                if name == "weighted":
                    opt.weight = 120 // comm.size
                train(model, opt, comm, t)
            told[name] = {
                "off": float((flat(model) - wanted).abs().max()),
                "moved": float((flat(model) - before).abs().max()),
                "print": zlib.crc32(flat(model).numpy().tobytes()),
                "one_replica": opt.one_replica,
            }
        # in one write: a launcher may cut a line that comes in two
        os.write(1, (json.dumps({"rank": comm.rank, "size": comm.size, "shares": comm.shares_memory, **told}) + "\n").encode())


if __name__ == "__main__":
    main()
