"""Outer steps: when a part of the parameters is sent, when it is back, and how it then changes the parameters.

    fast = slow + what this rank did since the part left

where `slow` has just made a step of the outer optimizer, by the mean pseudo-gradient. Without overlap nothing was done since, and
all ranks end the step with equal parameters.

Papers: Stich, "Local SGD Converges Fast and Communicates Little", arXiv 1805.09767; Douillard et al., "DiLoCo", arXiv 2311.08105;
Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv 2501.18512; Kolehmainen et al., "NoLoCo", arXiv
2506.10911.
docs/slow-networks.md has the differences.
"""

from __future__ import annotations

import math
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
from phalanx.grad.wires import Wire
from phalanx.grad.wires.carrier import Carrier, carrier_of, give, keep


class Rounds:
    """The outer parameters of one rank, their optimizer, and the parts in flight."""

    def __init__(self, comm: Communicator, sync: DiLoCo, wire: Wire | None) -> None:
        self._comm, self._sync, self._wire = comm, sync, wire
        self._params: list[torch.nn.Parameter] = []
        self._slow: list[torch.nn.Parameter] = []
        self._parts: list[range] = []
        self._flights: dict[int, Flight] = {}
        self._carriers: dict[int, list[tuple[Carrier | None, dict[str, range]]]] = {}  # of each part, by type
        self._kept: dict[str, dict[str, torch.Tensor]] = {}  # what carriers that do not exist yet will need
        self.optimizer: torch.optim.Optimizer | None = None
        self.transfers: list[TransferTime] = []
        self.record: StepRecord | None = None

    # ---- the parameters ------------------------------------------------------------------------------------------------------

    def begin(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Make the outer parameters copies of these. On later calls, add those that are new."""
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
        places = {id(p): i for i, p in enumerate(params)}
        now = {str(i): str(places[id(p)]) for i, p in enumerate(self._params) if id(p) in places}
        self._kept = {now[name]: state for name, state in self._errors().items() if name in now}
        self._carriers = {}
        self._params = list(params)
        self._slow = [known[id(p)] if id(p) in known else made[id(p)] for p in params]
        self._parts = cut([p.numel() for p in params], self._sync.fragments)

    def _carriers_of(self, part: int, flight: Flight) -> list[Carrier | None]:
        """Return the carriers of a part. They are made when it is sent for the first time, by all ranks together.

        An elastic job makes them every time, because the number of ranks may have changed.
        """
        if part not in self._carriers or self._comm.elastic:
            found: list[tuple[Carrier | None, dict[str, range]]] = []
            for flat, (dtype, begin, _) in zip(flight.segments, flight.packet.layout.segments):
                places = {}
                for i, slot in zip(self._parts[part], flight.packet.layout.slots):
                    if slot.wire == dtype:
                        first = slot.start - begin
                        places[str(i)] = range(first, first + math.prod(slot.shape))
                shapes = dict.fromkeys(places.values(), 1)
                found.append((carrier_of(self._wire, self._comm, flat, shapes=shapes, number=part), places))
            give(found, self._kept)
            self._carriers[part] = found
        return [carrier for carrier, _ in self._carriers[part]]

    def _errors(self) -> dict[str, dict[str, torch.Tensor]]:
        """What carriers keep, by the number of the parameter."""
        return self._kept | keep([pair for found in self._carriers.values() for pair in found])

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

    @torch.no_grad()
    def after_all(self, step: int) -> None:
        """The samples of an epoch are over: parts that have not just made an outer step make one. All ranks call it."""
        for part in range(len(self._parts)):
            if part not in self._sync.due(step):
                self._leave(part, step)
                self._land(part)

    def _leave(self, part: int, step: int) -> None:
        """Send a part. Without overlap, also wait for it. If a rank of an elastic job dies meanwhile, send it again."""
        if self._sync.travels:
            self._flights[part] = self._started(part, step)
        else:
            self._flights[part] = self._comm.as_one(lambda: self._there_and_back(part, step), counts=True)

    def _there_and_back(self, part: int, step: int) -> Flight:
        flight = self._started(part, step)
        flight.land()
        if self._comm.elastic and self._sync.partners == "random":
            self._comm.barrier()  # a partner has made its steps, but a result must show that all ranks have
        return flight

    def _started(self, part: int, step: int) -> Flight:
        random = self._sync.partners == "random"
        flight = Flight(step, self._fast(part), self._outer(part), both=random, travels=bool(self._sync.travels))
        if not random:
            flight.to_all(self._comm, self._carriers_of(part, flight), self._wire, f"outer step, part {part}")
        else:
            partner = partner_of(self._comm.rank, self._comm.size, self._sync.seed, step)
            if partner is None:
                flight.to_nobody()
            else:
                flight.to_one(self._comm, partner, step)
        return flight

    def _land(self, part: int) -> None:
        """Make the outer step of a part, and give its parameters the result."""
        flight = self._flights.pop(part)
        begun = time.perf_counter() if self._sync.travels else flight.set_out
        flight.land()
        if (took := flight.took) is not None:
            self.transfers.append(took)
            waited = time.perf_counter() - begun
            early = took.bytes if self._sync.travels else 0
            self.record = StepRecord(waited, took.ended - took.left, early, took.bytes, begun)
        if not flight.finite:
            remedy = ": use bfloat16" if self._wire is torch.float16 else ""
            warnings.warn(f"outer step, part {part}: values are infinite or NaN as {self._wire}{remedy}", stacklevel=6)
        assert self.optimizer is not None
        slow = [self._slow[i] for i in self._parts[part]]
        for p, gradient in zip(slow, flight.means):
            p.grad = gradient
        for p, mean in zip(slow, flight.slow_means):
            p.copy_(mean)  # a pair continues from the mean of both
        with torch.enable_grad():
            self.optimizer.step()
        for i, (x, p) in enumerate(zip(self._fast(part), slow)):
            p.grad = None
            if self._sync.travels:
                x.sub_(flight.sent[i]).add_(p.detach())
            else:
                x.copy_(p.detach())

    @torch.no_grad()
    def land_all(self) -> None:
        """Land all parts now, and not in the step in which they are due. All ranks call it."""
        for part in list(self._flights):
            self._land(part)

    @torch.no_grad()
    def begin_anew(self) -> None:
        """Give all parameters the values of the outer ones: this rank has done nothing since the last outer step."""
        for p, slow in zip(self._params, self._slow):
            real(p.detach()).copy_(slow.detach())

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
        """Outer parameters, the state of their optimizer, and the parts in flight, which it waits for."""
        if self.optimizer is None:
            return {}
        return {
            "slow": [p.detach().clone() for p in self._slow],
            "outer": self.optimizer.state_dict(),
            "under_way": {str(part): flight.state_dict() for part, flight in self._flights.items()},
            "wires": self._errors(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state. Call `begin` first."""
        if not state:
            return
        assert self.optimizer is not None
        for p, saved in zip(self._slow, state["slow"], strict=True):
            p.copy_(saved)
        self.optimizer.load_state_dict(state["outer"])
        self._carriers, self._kept = {}, state.get("wires", {})
        self._flights = {}
        for name, saved in state["under_way"].items():
            part = int(name)
            both = self._sync.partners == "random"
            self._flights[part] = Flight(int(saved["left"]), self._fast(part), self._outer(part), both=both, travels=True)
            self._flights[part].load_state_dict(saved)


def _wide(p: torch.nn.Parameter) -> torch.Tensor:
    """A copy, in 32 bits where the parameter has 16: outer steps may be too small for 16 bits."""
    x = real(p.detach())
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x.clone()
