"""`AllReduce(fused=True)`: sums the gradients and updates the parameters in one pass over memory, on one replica per host.

Ranks that share memory normally hold the same parameters W times, and compute the same update W times. Here the parameters and
the optimizer's moments exist once, in memory that all ranks see. The reducer reads the W gradients, applies the optimizer's rule
and writes the new parameters. It writes no mean, and there is no second pass to update. This is safe because all ranks have
finished backward when it starts, and none continues before it is done.

LARS needs the norms of the mean gradients before it can update anything, so a pass that only sums the gradients comes first. The
norms of the parameters cost nothing: the pass that updates them collects those for the next step (csrc/lars.hpp).

You see the same Parameters, but their memory is shared, and the moments in the optimizer's state are views of the shared ones.
One thing differs: if a rank writes to its parameters by hand, it writes to those of all ranks of the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from phalanx._torch_private import has_step_hooks
from phalanx.comm.communicator import Communicator
from phalanx.grad.arena import Arena
from phalanx.native.team import HostTeam
from phalanx.native.updates import AdamRow, SgdRow, table_of, update_adam, update_sgd
from phalanx.optim.lars import Lars, lars_row

ADAM = (torch.optim.Adam, torch.optim.AdamW)
KINDS = (torch.optim.SGD, Lars, *ADAM)


def why_not(optimizer: torch.optim.Optimizer, comm: Communicator) -> str:
    """Return why the step cannot be fused, or "" if it can. The same on all ranks."""
    if not comm.shares_memory:
        return "the ranks do not all share memory"
    if type(optimizer) not in KINDS:
        names = "torch.optim.SGD, Adam, AdamW or phalanx.Lars"
        return f"the optimizer is {type(optimizer).__name__}, not {names}"
    own_step = vars(optimizer).get("step")
    if own_step is not None and not hasattr(own_step, "_wrapped_by_lr_sched"):  # a scheduler only counts the calls
        return "the optimizer's step was replaced"
    if has_step_hooks(optimizer):
        return "the optimizer has step hooks"
    for group in optimizer.param_groups:
        for option in ("dampening", "maximize", "amsgrad", "differentiable"):
            if group.get(option):
                return f"{option} is not fused"
        for p in group["params"]:
            if p.dtype is not torch.float32 or not p.is_cpu or p.layout is not torch.strided:
                return f"a parameter is {p.dtype} on {p.device}, not float32 on the CPU"
    return ""


class Replica(NamedTuple):
    """The parameters of one arena and their moments, flat, once for all ranks. `squares` are the norms that LARS keeps."""

    arena: Arena
    parameters: torch.Tensor
    moments: tuple[torch.Tensor, ...]
    squares: torch.Tensor | None


class OnePass:
    """The parameters of `arenas` and the moments of `optimizer`, once for all ranks of `comm`."""

    def __init__(self, arenas: Sequence[Arena], optimizer: torch.optim.Optimizer, comm: Communicator) -> None:
        self._optimizer, self._comm = optimizer, comm
        self._names = ("exp_avg", "exp_avg_sq") if type(optimizer) in ADAM else ("momentum_buffer",)
        self._replicas = [self._replica(arena) for arena in arenas]
        self._carry = False  # whether the squares belong to the current parameters
        with torch.no_grad():
            for replica in self._replicas:
                for p, place in replica.arena.views_of(replica.parameters).items():
                    place.copy_(p)  # all ranks write the same values, because the replicas were compared
                    p.data = place
        self.take_state()

    def _replica(self, arena: Arena) -> Replica:
        def flat(numel: int) -> torch.Tensor:
            return self._comm.shared_buffer(numel)

        squares = None
        if type(self._optimizer) is Lars:
            squares = flat(2 * sum(row.squares for row in self._sgd_rows(arena))).view(torch.float64)
        size = arena.flat.numel()
        return Replica(arena, flat(size), tuple(flat(size) for _ in self._names), squares)

    def covers(self, arenas: Sequence[Arena]) -> bool:
        """Whether these are still the same arenas. They change when parameters are added, frozen or thawed."""
        return len(arenas) == len(self._replicas) and all(x is own.arena for x, own in zip(arenas, self._replicas))

    def take_state(self) -> None:
        """Copy the optimizer's moments to the shared buffers, and make its state views of them."""
        with torch.no_grad():
            for arena, _, moments, _ in self._replicas:
                for name, flat in zip(self._names, moments):
                    for p, place in arena.views_of(flat).items():
                        state: dict[str, Any] = self._optimizer.state[p]
                        found = state.get(name)
                        if found is None:
                            place.zero_()  # SGD's first velocity is the gradient itself, which is momentum * 0 + gradient
                        elif found.data_ptr() != place.data_ptr():
                            place.copy_(found)
                        state[name] = place
                        if type(self._optimizer) in ADAM:
                            state.setdefault("step", torch.tensor(0.0))
        self._carry = False  # if you loaded a state, you probably loaded parameters too
        self._comm.barrier()  # no rank updates what another one is still copying

    def update(self) -> None:
        """Do one step of the optimizer on all ranks' parameters, by the mean of their gradients."""
        for replica in self._replicas:
            arena = replica.arena
            table = table_of(self._adam_rows(arena) if type(self._optimizer) in ADAM else self._sgd_rows(arena))
            self._comm.on_host(f"update({len(table)} tensors)", partial(self._move, replica, table))
            torch.autograd.graph.increment_version(arena.starts)  # a second backward through the same graph must raise
        self._carry = True

    def _move(self, replica: Replica, table: torch.Tensor, team: HostTeam) -> None:
        arena, parameters, moments, squares = replica
        scale = 1 / self._comm.size
        if type(self._optimizer) in ADAM:
            first, second = moments
            update_adam(team, arena.flat, parameters, first, second, table, scale=scale)
        else:
            [velocities] = moments
            update_sgd(team, arena.flat, parameters, velocities, table, scale=scale, squares=squares, carry=self._carry)

    def _options(self) -> dict[torch.Tensor, tuple[dict[str, Any], bool]]:
        """Return the group of every parameter, and whether LARS adapts its steps."""
        found: dict[torch.Tensor, tuple[dict[str, Any], bool]] = {}
        for group in self._optimizer.param_groups:
            skipped = set(group.get("skipped", ()))
            found |= {p: (group, i not in skipped) for i, p in enumerate(group["params"])}
        return found

    def _sgd_rows(self, arena: Arena) -> list[SgdRow]:
        options, rows = self._options(), []
        for p, start in arena.starts.items():
            own, adapted = options[p]
            if type(self._optimizer) is Lars:
                rows.append(lars_row(own, adapted=adapted, offset=start, count=p.numel()))
            else:
                lr, momentum, decay = float(own["lr"]), own["momentum"], own["weight_decay"]
                rows.append(SgdRow(start, p.numel(), lr, momentum, decay, own["nesterov"]))
        return rows

    def _adam_rows(self, arena: Arena) -> list[AdamRow]:
        """Return the rows of the next step, and count it."""
        options, rows = self._options(), []
        for p, start in arena.starts.items():
            own, _ = options[p]
            step = self._optimizer.state[p]["step"]
            step += 1
            decoupled = bool(own.get("decoupled_weight_decay", type(self._optimizer) is torch.optim.AdamW))
            lr, (beta1, beta2), decay = float(own["lr"]), map(float, own["betas"]), own["weight_decay"]
            rows.append(AdamRow(start, p.numel(), lr, beta1, beta2, own["eps"], decay, decoupled, int(step)))
        return rows
