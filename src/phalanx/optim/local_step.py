"""Local steps around any torch optimizer: each rank updates its own replica, and once in many steps all take an outer step.

    opt = phalanx.create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm, sync=phalanx.LocalSGD(every=20))
    opt.follow(model)                    # batch norm statistics are averaged with the replicas
    ...
    opt.average_()                       # before an evaluation, and at the end: the exact mean of all replicas

In the first `start` steps all ranks average their gradients instead. `LocalSGD` is `DiLoCo` whose outer step has rate 1.
docs/slow-networks.md has the papers and the differences.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from phalanx.comm.communicator import Communicator
from phalanx.grad.gossip.packet import Packet, mean_packet, real
from phalanx.grad.gossip.spread import spread
from phalanx.grad.local import DiLoCo, LocalSGD, level_of
from phalanx.grad.local.rounds import Rounds
from phalanx.grad.record import StepRecord
from phalanx.grad.reducer import TransferTime
from phalanx.grad.unfinished import NothingElse
from phalanx.grad.wires import PowerSGD, Wire, check_any_wire
from phalanx.optim.own_replica import OwnReplica
from phalanx.optim.replica import replica


class LocalOptimizer(OwnReplica):
    """Made by `create_multi_node_optimizer(..., sync=phalanx.LocalSGD(...))` or `DiLoCo`. A torch optimizer for schedulers."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        comm: Communicator,
        sync: LocalSGD | DiLoCo,
        wire: Wire | None,
        bucket_bytes: int | None,
    ) -> None:
        super().__init__(optimizer, comm, bucket_bytes)
        self.sync = sync
        plan = sync.as_outer_steps() if isinstance(sync, LocalSGD) else sync
        if plan.wire is not None and wire is not None:
            raise ValueError(f"wire={wire} and DiLoCo(wire={plan.wire}): set one of them")
        self._wire = plan.wire or wire
        if isinstance(self._wire, PowerSGD):
            raise ValueError(f"wire={self._wire}: local steps send torch.float16, torch.bfloat16 or phalanx.Int8(...)")
        check_any_wire(self._wire)
        if self._wire is not None and plan.partners == "random":
            raise ValueError(f"wire={self._wire} needs partners='all': one partner gets uncompressed parameters")
        self._plan = plan
        self._rounds = Rounds(comm, plan, self._wire)
        acts_as_one = level_of(comm, plan) == "host"
        if bucket_bytes is not None and not (acts_as_one or plan.start):
            raise ValueError(
                f"bucket_bytes={bucket_bytes}: local steps send parts. Groups are for level='host' and the first `start` steps"
            )
        self._host = comm.split(comm.inter_rank) if acts_as_one else None
        self._averaged_at = 0  # the step after which `average_` made the replicas equal
        self._gather()
        if comm.elastic:
            self.following.comm.on_landing(self._land)

    # ---- the step ----------------------------------------------------------------------------------------------------------

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        if closure is None:
            self._average_at_home()  # first: a rank that had no backward joins the others here
        self._begin()
        scaler = self._unscaling()
        overflowed = False
        if scaler.found is not None and not scaler.is_inner:
            overflowed = bool(scaler.found)
            if not overflowed:
                scaler.divide([p.grad for p in self._trained() if p.grad is not None])
        result = None
        if closure is not None:
            result = self.optimizer.step(self._at_home(closure))
        elif not overflowed:
            result = scaler.step_inner() if scaler.is_inner else self.optimizer.step()
        if self._home is not None:
            self._home.next_step()
        self._steps += 1
        if self._steps > self._plan.start:
            self._rounds.after(self._steps - self._plan.start)
        self._gather()
        return result

    def _gather(self) -> None:
        """Let gradients be averaged by those ranks that the next step wants: all, those of a host, or none."""
        together = self.comm if self._steps < self._plan.start else self._host
        if together is not self._together:
            self._average_among(together)
            self._forget()  # the next step compares the replicas before they part

    def _forget(self) -> None:
        """There is no outer state yet, and it is not known whether the replicas are equal."""
        self._rounds, self._checked = Rounds(self.comm, self._plan, self._wire), []

    def synchronize(self) -> None:
        """Make every gradient the mean over the ranks that average in every step. After any `backward()` it already is."""
        self._average_at_home()

    def _at_home(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure, with means over the ranks that average in every step, if there are such."""
        if self._home is None:
            return closure
        home = self._home

        def averaged() -> Any:
            with torch.enable_grad():
                home.next_evaluation()
                loss = closure()
            self.synchronize()
            return home.mean(loss)

        return averaged

    def _begin(self) -> None:
        """Compare parameters that were not seen before, on all ranks: later they may differ."""

        def options() -> list[str]:
            if self._steps >= self._plan.start:
                self._rounds.begin(self._trained())
            outer = self._rounds.optimizer
            own = [*(repr(getattr(self._plan, name)) for name in COMPARED), str(self._wire)]
            return own if outer is None else [*own, type(outer).__name__, repr(sorted(outer.defaults.items()))]

        self._check_new(options)

    # ---- all replicas ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def average_(self) -> None:
        """Make all replicas equal, bit for bit: parameters, optimizer state and followed statistics become the exact mean.

        Parts in flight arrive first. All ranks call it. It costs an all-reduce of everything; before the first local step, one of
        the statistics.
        """
        self._rounds.land_all()
        parameters, state = replica(self.optimizer, self._trained())
        always = [*parameters, *self._rounds.outer_tensors(), *self._statistics]
        if 0 < self._steps <= self._plan.start:  # all replicas are equal, and their mean would be rounded
            always, state = self._statistics, []

        def means() -> list[tuple[list[torch.Tensor], Packet]]:
            alike = self.comm.allgather_obj([list(x.shape) for x in state])
            with_state = bool(state) and all(own == alike[0] for own in alike)  # a rank may have no state yet
            return [(xs, mean_packet(xs, self.comm)) for xs in (always, state if with_state else []) if xs]

        for tensors, mean in self.comm.as_one(means, counts=True):
            mean.unpack(tensors)
        self._averaged_at = self._steps

    # ---- ranks that die and join ---------------------------------------------------------------------------------------------

    def _land(self, *, at_end: bool) -> None:
        """At the end of an epoch all ranks make an outer step, so that what a rank has trained reaches the others."""
        if at_end and self._averaged_at != self._steps:
            self._rounds.after_all(self._steps)

    def own_state(self) -> dict[str, Any]:
        """What a rank that joins gets beside the state of the inner optimizer. For Phalanx itself."""
        equal = self._averaged_at == self._steps
        return {"steps": self._steps, "equal": equal, "rounds": self._rounds.state_dict()}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """On a rank that joins: it begins with the outer parameters, without the others' own steps since then."""
        self._steps = state["steps"]
        if state["rounds"]:
            self._rounds.begin(self._trained())
            self._rounds.load_state_dict(state["rounds"])
            self._checked = self.parameters()[0]
        if state["equal"]:
            self._averaged_at = self._steps
        else:
            self._rounds.begin_anew()

    # ---- all replicas, seen from outside -------------------------------------------------------------------------------------

    def spread(self) -> float:
        """How far the replicas are apart: the consensus distance, relative to the length of their mean. All ranks call it."""
        return spread([real(p.detach()) for p in self._trained()], self.comm)

    @property
    def outer(self) -> torch.optim.Optimizer:
        """The outer optimizer, for a schedule of its rate. It exists from the first local step on."""
        if self._rounds.optimizer is None:
            raise RuntimeError("opt.outer exists from the first local step on: until then parameters may still change together")
        return self._rounds.optimizer

    # ---- as every multi-node optimizer's --------------------------------------------------------------------------------------

    @property
    def last_record(self) -> StepRecord | None:
        """The times of the part that arrived in the last step; None if none did."""
        return self._rounds.record

    @property
    def last_transfers(self) -> list[TransferTime]:
        """The transfers of the parts that arrived in the last step."""
        return list(self._rounds.transfers)

    @property
    def communication(self) -> NothingElse:
        """Empty: parts in flight are in `opt.state_dict()`."""
        return NothingElse()

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, readable without Phalanx, plus the state of the outer steps and the parts in flight.

        It waits for these parts.
        """
        return self.optimizer.state_dict() | {"local": {"steps": self._steps, "rounds": self._rounds.state_dict()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue bit for bit, each rank with its own replica. Load the parameters first."""
        stands = state_dict.get("local")
        if stands and stands["rounds"] and stands["steps"] < self._plan.start:
            raise ValueError(
                f"the state has local steps before step {stands['steps']}, so replicas differ, but start={self._plan.start} "
                f"would average gradients after it: use a start of at most {stands['steps']}"
            )
        self.optimizer.load_state_dict({key: value for key, value in state_dict.items() if key != "local"})
        if stands is None:  # the state of the inner optimizer alone
            return
        self._steps = stands["steps"]
        self._gather()
        if stands["rounds"]:  # replicas that have trained may differ
            self._rounds.begin(self._trained())
            self._rounds.load_state_dict(stands["rounds"])
            self._checked = self.parameters()[0]
        else:  # the first local step is still to come
            self._forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalOptimizer:
        """On the same communicator, with copies of parameters and of all state. All ranks make it."""
        wire = None if self._plan.wire is not None else self._wire
        twin = LocalOptimizer(copy.deepcopy(self.optimizer, memo), self.comm, self.sync, wire, self._bucket_bytes)
        if self._steps:
            twin.load_state_dict(copy.deepcopy(self.state_dict()))
        twin._statistics = copy.deepcopy(self._statistics, memo)
        memo[id(self)] = twin
        return twin

    def __repr__(self) -> str:
        return f"LocalOptimizer({self.optimizer!r}, {self.comm!r}, {self.sync!r})"


COMPARED = ("every", "fragments", "overlap", "partners", "seed", "start")
