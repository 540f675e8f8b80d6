"""Summing the gradients and updating the parameters in one pass over the memory, on one replica per host.

Ranks that share memory all hold the same parameters, W times over, and all compute the same update, W times over. Here the
parameters and their momentum lie once in memory that all ranks see; the reducer reads the W gradients, applies the rule of
torch.optim.SGD and writes the new parameters: no mean is written back, no second pass updates. Safe because all ranks have
finished backward when it starts, and none goes on before it is done.

What a user sees is the same: `p` is the same Parameter with its memory elsewhere, and its momentum in the optimizer's state is a
view of the shared one. Different is that a rank which writes to its parameters by hand writes to those of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from phalanx.comm.communicator import Communicator
from phalanx.comm.transports.shm import Rule
from phalanx.grad.arena import Arena
from phalanx.optim.host_replica import objection


def obstacle(optimizer: torch.optim.Optimizer, comm: Communicator) -> str:
    """Why it cannot be done, the same on all ranks; empty if it can."""
    if not comm.shares_memory:
        return "the ranks do not all share memory"
    if why := objection(optimizer):
        return why
    for group in optimizer.param_groups:
        if group["dampening"] or group["maximize"]:
            return "dampening and maximize are not fused"
        for p in group["params"]:
            if p.dtype is not torch.float32 or not p.is_cpu or p.layout is not torch.strided:
                return f"a parameter is {p.dtype} on {p.device}, not float32 on the CPU"
    return ""


class OnePass:
    """The parameters of `arenas` once for all ranks of `comm`, and the momentum of `optimizer`."""

    def __init__(self, arenas: Sequence[Arena], optimizer: torch.optim.Optimizer, comm: Communicator) -> None:
        self._arenas, self._optimizer, self._comm = list(arenas), optimizer, comm
        self._parameters = [comm.shared_buffer(arena.flat.numel()) for arena in arenas]
        self._velocities = [comm.shared_buffer(arena.flat.numel()) for arena in arenas]
        with torch.no_grad():
            for arena, flat in zip(self._arenas, self._parameters):
                for p, place in arena.views_of(flat).items():
                    place.copy_(p)  # by all ranks, the same values: the replicas were compared
                    p.data = place
        self.take_state()

    @staticmethod
    def over(arenas: Sequence[Arena], before: OnePass | None, optimizer: torch.optim.Optimizer, comm: Communicator) -> OnePass:
        """The replica for these arenas: the one that was before, unless parameters were added, frozen or thawed."""
        if before is not None and len(arenas) == len(before._arenas) and all(x is y for x, y in zip(arenas, before._arenas)):
            return before
        return OnePass(arenas, optimizer, comm)

    def take_state(self) -> None:
        """Bring the optimizer's momentum into the shared buffers, and make it a view of them."""
        with torch.no_grad():
            for arena, flat in zip(self._arenas, self._velocities):
                for p, place in arena.views_of(flat).items():
                    state: dict[str, Any] = self._optimizer.state[p]
                    found = state.get("momentum_buffer")
                    if found is None:
                        place.zero_()  # torch begins with the gradient itself, which is what zero times momentum plus it is
                    elif found.data_ptr() != place.data_ptr():
                        place.copy_(found)
                    state["momentum_buffer"] = place
        self._comm.barrier()  # nobody updates what another one still copies

    def update(self) -> None:
        """One step of SGD on all ranks' parameters, by the mean of their gradients."""
        options = {p: group for group in self._optimizer.param_groups for p in group["params"]}
        for arena, parameters, velocities in zip(self._arenas, self._parameters, self._velocities):
            rules = []
            for p, start in arena.starts.items():
                own = options[p]
                rule = Rule(start, p.numel(), float(own["lr"]), own["momentum"], own["weight_decay"], own["nesterov"])
                rules.append(rule)
            self._comm.update(arena.flat, parameters, velocities, rules)
