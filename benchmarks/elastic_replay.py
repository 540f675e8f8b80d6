"""The same steps without a fault: ranks as threads, one per host, that train what the ranks of an elastic job have trained.

One process that adds gradients in rank order has other rounding errors than ranks on several hosts, whose schedules add in other
orders. Threads of `run_local` run the same schedules, so their weights must be equal bit for bit.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from elastic_training import Made, build, data, fingerprint

import phalanx


def replay_on_hosts(steps: list[Made]) -> str:
    """The fingerprint of the weights after these steps, made by undisturbed worlds of the same sizes."""
    model, optimizer = build()
    state: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    begun = 0
    while begun < len(steps):
        members = steps[begun][0]
        end = next((i for i in range(begun, len(steps)) if steps[i][0] != members), len(steps))
        state = _train(members, steps[begun:end], state)
        begun = end
    model.load_state_dict(state["model"])
    return fingerprint(model)


def _train(members: list[int], steps: list[Made], before: dict[str, Any]) -> dict[str, Any]:
    x, y, _ = data()

    def run(comm: phalanx.Communicator) -> dict[str, Any]:
        model, inner = build()
        model.load_state_dict(before["model"])
        inner.load_state_dict(
            copy.deepcopy(before["optimizer"])
        )  # torch takes its tensors as they are, and ranks are threads here
        opt = phalanx.create_multi_node_optimizer(inner, comm, sync=phalanx.AllReduce(overlap=False))
        for _, took, uneven in steps:
            if uneven:
                raise ValueError("a batch that the ranks do not share evenly: gradients count by samples there, and not here")
            ids = torch.tensor(took[members[comm.rank]], dtype=torch.int64)
            opt.zero_grad()
            torch.nn.functional.cross_entropy(model(x[ids]), y[ids], reduction="none").mean().backward()
            opt.step()
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    if len(members) == 1:
        with phalanx.create_communicator() as comm:
            return run(comm)
    return phalanx.run_local(len(members), run, hosts=len(members))[0]
