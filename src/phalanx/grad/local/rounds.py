"""Outer steps: when a part of the parameters leaves, when it is back, and what becomes of the parameters then.

    fast = slow + what this rank did since the part left

where `slow` has just made a step of the outer optimizer, by the mean pseudo-gradient. Without overlap nothing was done since, and
all ranks end the step with equal parameters.

Papers: Stich, "Local SGD Converges Fast and Communicates Little", arXiv 1805.09767; Douillard et al., "DiLoCo", arXiv 2311.08105;
Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv 2501.18512; Kolehmainen et al., "NoLoCo", arXiv
2506.10911.
docs/slow-networks.md has the differences.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from phalanx.comm.communicator import Communicator
from phalanx.grad.gossip.packet import real
from phalanx.grad.local import DiLoCo
from phalanx.grad.local.flight import Flight, partner_of
from phalanx.grad.local.parts import cut
from phalanx.grad.record import StepRecord
from phalanx.grad.reducer import TransferTime


class Rounds:
    """The outer parameters of one rank, their optimizer, and the parts that are under way."""

    def __init__(self, comm: Communicator, sync: DiLoCo, wire: torch.dtype | None) -> None:
        self._comm, self._sync, self._wire = comm, sync, wire
        self._params: list[torch.nn.Parameter] = []
        self._slow: list[torch.nn.Parameter] = []
        self._parts: list[range] = []
        self._flights: dict[int, Flight] = {}
        self.optimizer: torch.optim.Optimizer | None = None
        self.transfers: list[TransferTime] = []
        self.record: StepRecord | None = None

    # ---- the parameters ------------------------------------------------------------------------------------------------------

    def begin(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Take these parameters as they are for the outer ones; on later calls, those that are new."""
        if len(params) == len(self._params) and all(a is b for a, b in zip(params, self._params)):
            return
        known = {id(p): slow for p, slow in zip(self._params, self._slow)}
        fresh = [p for p in params if id(p) not in known]
        if self._params:
            self.land_all()
        made = {id(p): torch.nn.Parameter(_wide(p)) for p in fresh}
        if self.optimizer is None:
            self.optimizer = self._sync.build(list(made.values()))
        elif made:
            self.optimizer.add_param_group({"params": list(made.values())})
        self._params = list(params)
        self._slow = [known[id(p)] if id(p) in known else made[id(p)] for p in params]
        self._parts = cut([p.numel() for p in params], self._sync.fragments)

    def _fast(self, part: int) -> list[torch.Tensor]:
        return [real(self._params[i].detach()) for i in self._parts[part]]

    def _outer(self, part: int) -> list[torch.Tensor]:
        return [self._slow[i].detach() for i in self._parts[part]]

    # ---- a step --------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def after(self, step: int) -> None:
        """Inner step number `step` is over: land what is due, send what is due."""
        self.transfers, self.record = [], None
        for part in [part for part, flight in self._flights.items() if step >= flight.left + self._sync.travels]:
            self._land(part)
        for part in self._sync.due(step):
            self._leave(part, step)
            if not self._sync.travels:
                self._land(part)

    def _leave(self, part: int, step: int) -> None:
        random = self._sync.partners == "random"
        flight = Flight(step, self._fast(part), self._outer(part), both=random)
        if not random:
            flight.to_all(self._comm, self._wire, f"outer step, part {part}")
        else:
            partner = partner_of(self._comm.rank, self._comm.size, self._sync.seed, step)
            if partner is not None:
                flight.to_one(self._comm, partner, step)
        self._flights[part] = flight

    def _land(self, part: int) -> None:
        """Make the outer step of a part, and give its parameters the result."""
        flight, begun = self._flights.pop(part), time.perf_counter()
        if (took := flight.land()) is not None:
            self.transfers.append(took)
            waited = time.perf_counter() - begun
            early = took.bytes if self._sync.travels else 0
            self.record = StepRecord(waited, took.ended - took.left, early, took.bytes, begun)
        if not flight.finite:
            warnings.warn(f"outer step, part {part}: values became infinite or NaN as {self._wire}: use bfloat16", stacklevel=6)
        assert self.optimizer is not None
        slow = [self._slow[i] for i in self._parts[part]]
        for p, gradient in zip(slow, flight.means):
            p.grad = gradient
        for p, mean in zip(slow, flight.slow_means):
            p.copy_(mean)  # a pair goes on from the mean of both
        with torch.enable_grad():
            self.optimizer.step()
        for x, p, sent in zip(self._fast(part), slow, flight.sent):
            p.grad = None
            if self._sync.travels:
                x.sub_(sent).add_(p.detach())
            else:
                x.copy_(p.detach())

    @torch.no_grad()
    def land_all(self) -> None:
        """Do not wait for the step in which they are due. All ranks call it."""
        for part in list(self._flights):
            self._land(part)

    def outer_tensors(self) -> list[torch.Tensor]:
        """Outer parameters and the state of their optimizer, where ranks have different ones."""
        if self._sync.partners == "all" or self.optimizer is None:
            return []
        state = [
            value
            for p in self._slow
            for _, value in sorted(self.optimizer.state.get(p, {}).items())
            if isinstance(value, torch.Tensor) and value.shape == p.shape
        ]
        return [*(p.detach() for p in self._slow), *state]

    # ---- checkpoints ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Outer parameters, the state of their optimizer, and what is under way, which it waits for."""
        if self.optimizer is None:
            return {}
        return {
            "slow": [p.detach().clone() for p in self._slow],
            "outer": self.optimizer.state_dict(),
            "under_way": {str(part): flight.state_dict() for part, flight in self._flights.items()},
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there. `begin` came before."""
        if not state:
            return
        assert self.optimizer is not None
        for p, saved in zip(self._slow, state["slow"], strict=True):
            p.copy_(saved)
        self.optimizer.load_state_dict(state["outer"])
        self._flights = {}
        for name, saved in state["under_way"].items():
            part = int(name)
            both = self._sync.partners == "random"
            self._flights[part] = Flight(int(saved["left"]), self._fast(part), self._outer(part), both=both)
            self._flights[part].load_state_dict(saved)


def _wide(p: torch.nn.Parameter) -> torch.Tensor:
    """A copy, in 32 bits where the parameter has 16: outer steps may be smaller than those can tell."""
    x = real(p.detach())
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x.clone()
