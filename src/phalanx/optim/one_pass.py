"""Summing the gradients and updating the parameters in one pass over the memory, on one replica per host.

Ranks that share memory all hold the same parameters, W times over, and all compute the same update, W times over. Here the
parameters and their momentum lie once in memory that all ranks see; the reducer reads the W gradients, applies the rule of
torch.optim.SGD or phalanx.Lars and writes the new parameters: no mean is written back, no second pass updates. Safe because all
ranks have finished backward when it starts, and none goes on before it is done.

LARS needs the norms of the mean gradients before it can move anything: a pass that sums the gradients for that alone comes first.
The norms of the parameters cost nothing, because the pass that updates them gathers those of the next step (csrc/lars.hpp).

What a user sees is the same: `p` is the same Parameter with its memory elsewhere, and its momentum in the optimizer's state is a
view of the shared one. Different is that a rank which writes to its parameters by hand writes to those of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from phalanx.comm.communicator import Communicator
from phalanx.comm.transports.shm import Rule
from phalanx.grad.arena import Arena
from phalanx.optim.host_replica import altered
from phalanx.optim.lars import Lars, lars_rule


def obstacle(optimizer: torch.optim.Optimizer, comm: Communicator) -> str:
    """Why it cannot be done, the same on all ranks; empty if it can."""
    if not comm.shares_memory:
        return "the ranks do not all share memory"
    if type(optimizer) not in (torch.optim.SGD, Lars):
        return f"the optimizer is {type(optimizer).__name__}, not torch.optim.SGD or phalanx.Lars"
    if why := altered(optimizer):
        return why
    for group in optimizer.param_groups:
        if group.get("dampening") or group.get("maximize"):
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
        self._squares = [self._room_for_squares(arena) for arena in arenas]
        self._carry = False  # whether `_squares` are those of the parameters
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
        self._carry = False  # who loads a state has most likely loaded parameters
        self._comm.barrier()  # nobody updates what another one still copies

    def update(self) -> None:
        """One step of the optimizer on all ranks' parameters, by the mean of their gradients."""
        for arena, parameters, velocities, squares in zip(self._arenas, self._parameters, self._velocities, self._squares):
            rules = list(self._rules(arena))
            self._comm.update(arena.flat, parameters, velocities, rules, squares=squares, carry=self._carry)
            # as after any step: who goes backward once more, through the same graph, learns that it is too late
            torch.autograd.graph.increment_version(arena.starts)
        self._carry = True

    def _rules(self, arena: Arena) -> Iterator[Rule]:
        """How the tensors of an arena move."""
        options: dict[torch.Tensor, tuple[dict[str, Any], bool]] = {}
        for group in self._optimizer.param_groups:
            skipped = set(group.get("skipped", ()))
            options |= {p: (group, i not in skipped) for i, p in enumerate(group["params"])}
        for p, start in arena.starts.items():
            own, adapted = options[p]
            if type(self._optimizer) is Lars:
                yield lars_rule(own, adapted=adapted, offset=start, count=p.numel())
            else:
                yield Rule(start, p.numel(), float(own["lr"]), own["momentum"], own["weight_decay"], own["nesterov"])

    def _room_for_squares(self, arena: Arena) -> torch.Tensor | None:
        if type(self._optimizer) is not Lars:
            return None
        return self._comm.shared_buffer(2 * sum(rule.squares for rule in self._rules(arena))).view(torch.float64)
