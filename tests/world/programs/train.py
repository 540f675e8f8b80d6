"""Training with every option, and how far it is from one process with the whole batch: part of `hello.py train`."""

from __future__ import annotations

import copy
import zlib
from typing import Any

import torch
from tests.optim.oracle import MODEL, SAMPLES, X, Y, alone, create_multi_node_optimizer, flat, loss_of, sgd

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
    "large": {},
    "one pass": {"sync": phalanx.AllReduce(fused=True)},  # of the model in float32
    "weighted": {"sync": phalanx.AllReduce(weighted=True)},  # the weights are sent in a message of their own
    "weighted, at once": {"sync": phalanx.AllReduce(weighted=True, overlap=False)},  # and here beside the gradients
    "bfloat16": {"wire": torch.bfloat16},
    "float16": {"wire": torch.float16},
}
MODELS = {"large": LARGE, "one pass": copy.deepcopy(MODEL).float()}


def train(model: torch.nn.Module, opt: torch.optim.Optimizer, comm: phalanx.Communicator | None, t: int) -> None:
    opt.zero_grad()
    loss_of(model, comm, t, dtype=next(model.parameters()).dtype).backward()
    opt.step()


def shares(ranks: int, t: int) -> list[int]:
    """Samples of each rank in step `t`: unequal, changing, and none for one rank."""
    if ranks == 1:
        return [SAMPLES]
    parts = [(rank + t) % ranks for rank in range(ranks)]
    own = [SAMPLES * part // sum(parts) for part in parts]
    own[parts.index(ranks - 1)] += SAMPLES - sum(own)
    return own


def train_unevenly(model: torch.nn.Module, opt: torch.optim.Optimizer, comm: phalanx.Communicator, t: int) -> None:
    own = shares(comm.size, t)
    opt.weight, begin = own[comm.rank], sum(own[: comm.rank])
    opt.zero_grad()
    if own[comm.rank] or t % 2:  # a rank without samples computes NaN, or nothing
        x, y = (every[t][begin : begin + own[comm.rank]] for every in (X, Y))
        ((model(x) - y) ** 2).mean().backward()
    opt.step()


def results(comm: phalanx.Communicator) -> dict[str, dict[str, Any]]:
    """What each option did to the parameters of this rank."""
    told: dict[str, dict[str, Any]] = {}
    for name, options in OPTIONS.items():
        model = copy.deepcopy(MODELS.get(name, MODEL))
        phalanx.bcast_parameters(model, comm)
        wanted = alone(train, steps=STEPS, model=model)[-1]
        opt, before = create_multi_node_optimizer(sgd(model), comm, **options), flat(model)
        for t in range(STEPS):
            (train_unevenly if "weighted" in name else train)(model, opt, comm, t)
        told[name] = {
            "off": float((flat(model) - wanted).abs().max()),
            "moved": float((flat(model) - before).abs().max()),
            "print": zlib.crc32(flat(model).numpy().tobytes()),
            "one_replica": opt.one_replica,
        }
    return told
