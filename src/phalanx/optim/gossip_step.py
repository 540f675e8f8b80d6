"""GossipGraD around any torch optimizer: each rank updates its own replica and mixes it with one partner's per step.

    opt = phalanx.create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm, sync=phalanx.Gossip())
    opt.follow(model)                    # batch norm statistics are mixed, too
    ...
    opt.average_()                       # before an evaluation, and at the end: the exact mean of all replicas

Paper: Daily et al., arXiv 1803.05880. docs/gossip.md has the update rules and the differences.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch

from phalanx.comm.communicator import Communicator
from phalanx.grad.gossip import Gossip, level_of
from phalanx.grad.gossip.elastic import ElasticGossiper
from phalanx.grad.gossip.gossiper import Gossiper
from phalanx.grad.gossip.packet import real
from phalanx.grad.record import StepRecord
from phalanx.grad.reducer import TransferTime
from phalanx.grad.replicas import some
from phalanx.grad.twice import GOSSIPED, SecondAverage
from phalanx.grad.wire import check_wire
from phalanx.optim.own_replica import OwnReplica
from phalanx.optim.replica import replica, whole_replica


class GossipOptimizer(OwnReplica):
    """Made by `create_multi_node_optimizer(..., sync=phalanx.Gossip(...))`. A torch optimizer for schedulers and checkpoints."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        comm: Communicator,
        sync: Gossip,
        wire: torch.dtype | None,
        bucket_bytes: int | None,
    ) -> None:
        super().__init__(optimizer, comm, bucket_bytes)
        check_wire(wire)
        self.sync = sync
        home = comm.split(comm.inter_rank) if level_of(comm, sync) == "host" else None
        self._gossiper: Gossiper | ElasticGossiper
        if comm.elastic:
            self._gossiper = ElasticGossiper(self.following.comm, sync, wire)
        else:
            self._gossiper = Gossiper(comm, home, sync, wire)
        self._gossiper.offer(self._whole_replica)
        self._average_among(home)
        self._wire = wire
        self._second = SecondAverage(comm, GOSSIPED, self._trained() if home is None else ())
        self._mixed = self._overflowed = False  # this step's gradients
        self._unused_told = False

    # ---- the step ----------------------------------------------------------------------------------------------------------

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        result = None
        if closure is not None and self.sync.exchange == "gradients":
            raise ValueError("step(closure) needs Gossip(exchange='weights'): ranks may call it a different number of times")
        if closure is None:
            self._average_at_home()  # first: a rank that had no backward joins the others of its host here
        self._check_replicas()
        scaler = self._unscaling()
        gradients = [p.grad for p in self._trained() if p.grad is not None]
        overflowed = self._overflowed = scaler.unscale(gradients, mixes=self.sync.exchange == "gradients")
        if closure is not None:
            result = self.optimizer.step(self._complete(closure))
        else:
            if overflowed:
                for p in self._trained():
                    p.grad = None  # counts as zeros; the partner continues
            self.synchronize()
            if not overflowed or self.sync.exchange == "gradients":
                result = scaler.step_inner() if self.sync.exchange == "weights" and scaler.is_inner else self.optimizer.step()
        if self._home is not None:
            self._home.next_step()
        self._mixed = self._overflowed = False
        self._second.stop()
        self._steps += 1
        if self.sync.exchange == "weights":
            parameters, state = self._replica()
            self._gossiper.steps = self._steps
            self._gossiper.mix([*parameters, *state], len(state), self._statistics)
            self._steps = self._gossiper.steps
        if self.sync.average_every is not None and self._steps % self.sync.average_every == 0:
            self.average_()
        return result

    def synchronize(self) -> None:
        """Complete the gradients before you clip or read them. All ranks call it.

        Then they are this rank's own, or the mean over its host. With exchange="gradients" they are mixed with the partner's.
        """
        self._average_at_home()
        self._check_replicas()
        if self._home is None or self._overflowed:
            self._fill_missing()
        if self.sync.exchange == "gradients" and not self._mixed:
            self._mixed = True
            gradients = [real(p.grad.detach()) for p in self._trained() if p.grad is not None]
            self._gossiper.steps = self._steps
            self._gossiper.mix_gradients(gradients, self._statistics)
            self._steps = self._gossiper.steps

    def _complete(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure, with gradients for all parameters. If the ranks of a host act as one, these are means over them."""

        def completed() -> Any:
            with torch.enable_grad():
                loss = closure()
            if self._home is None:
                self._fill_missing()
                return loss
            self._home.next_step()
            self.synchronize()
            return self._home.mean(loss)

        return completed

    def _fill_missing(self) -> None:
        """A parameter without a gradient counts as zeros on this rank, because all ranks need the same optimizer state."""
        params, names = self.parameters()
        unused = [(p, name) for p, name in zip(params, names) if p.requires_grad and p.grad is None]
        for p, _ in unused:
            p.grad = torch.zeros_like(p)
        for p in self._trained():
            if p.grad is not None and p.grad.layout is not torch.strided and self.sync.exchange == "gradients":
                p.grad = p.grad.to_dense()
        if unused and not self._unused_told and not self._overflowed:
            self._unused_told = True
            warnings.warn(
                f"rank {self.comm.rank}: no gradient for {len(unused)} parameter(s), {some([name for _, name in unused])}; "
                "they count as zeros. This is the only warning",
                stacklevel=5,
            )

    def _check_replicas(self) -> None:
        self._check_new(lambda: [repr(self.sync), str(self._wire)])

    def _replica(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return replica(self.optimizer, self._trained())

    def _whole_replica(self) -> list[torch.Tensor]:
        """All that a rank takes over after it was left behind."""
        return [*whole_replica(self.optimizer, self._trained()), *self._statistics]

    # ---- ranks that die and join ---------------------------------------------------------------------------------------------

    def own_state(self) -> dict[str, Any]:
        """What a rank that joins gets beside the state of the inner optimizer. For Phalanx itself."""
        assert isinstance(self._gossiper, ElasticGossiper)
        return {"steps": self._steps, "gossip": self._gossiper.state()}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """On a rank that joins: its replica is a copy of another one's. For Phalanx itself."""
        assert isinstance(self._gossiper, ElasticGossiper)
        self._steps = state["steps"]
        self._gossiper.load(state["gossip"])
        if self._steps:
            self._checked = self.parameters()[0]

    # ---- all replicas ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def average_(self) -> None:
        """Make all replicas equal, bit for bit: parameters, optimizer state and followed statistics become the exact mean.

        The exchange in flight arrives first. All ranks call it. It costs an all-reduce of everything, and a roll call.
        """
        parameters, state = self._replica()
        if self.sync.exchange == "weights":
            self._gossiper.settle([*parameters, *state], len(state), self._statistics)
        self._gossiper.average([*parameters, *state, *self._statistics])

    def spread(self) -> float:
        """How far the replicas are apart: the consensus distance, relative to the length of their mean. All ranks call it.

        It is measured on at most 65536 parameters. It costs an all-reduce of half a megabyte, and a roll call.
        """
        return self._gossiper.spread(self._replica()[0])

    def survivors(self) -> Communicator:
        """A communicator of all ranks that are left, for example for an evaluation. All of them call it."""
        return self._gossiper.survivors()

    @property
    def steps(self) -> int:
        """Steps done by all ranks together. More than this rank's own if it was left behind and took over a replica.

        For loops that all ranks should leave together: `while opt.steps < total`.
        """
        return self._steps

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that this one knows to be dead or left out, and those that did not answer when it asked them last."""
        return self._gossiper.missing

    # ---- as every multi-node optimizer's --------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's."""
        self._mixed = False
        super().zero_grad(set_to_none)

    @property
    def last_record(self) -> StepRecord | None:
        """The times of the exchange that arrived in the last step; None if none did."""
        return self._gossiper.record

    @property
    def last_transfers(self) -> list[TransferTime]:
        """The transfer of the exchange that arrived in the last step."""
        return list(self._gossiper.transfers)

    @property
    def communication(self) -> Gossiper | ElasticGossiper:
        """The next exchange and the one in flight, as `state_dict()`. With it a checkpoint continues bit for bit."""
        return self._gossiper

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, readable without Phalanx, plus the steps and the next round of gossip."""
        return self.optimizer.state_dict() | {"gossip": {"steps": self._steps, "round": self._gossiper.round}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        stands = state_dict.get("gossip", {"steps": 0, "round": 0})
        self.optimizer.load_state_dict({key: value for key, value in state_dict.items() if key != "gossip"})
        self._steps, self._gossiper.round = stands["steps"], stands["round"]
        if self._steps:  # replicas that have trained may differ
            self._checked = self.parameters()[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> GossipOptimizer:
        """On the same communicator, with copies of the parameters and of the inner optimizer's state. All ranks make it."""
        twin = GossipOptimizer(copy.deepcopy(self.optimizer, memo), self.comm, self.sync, self._wire, self._bucket_bytes)
        twin._statistics = copy.deepcopy(self._statistics, memo)
        memo[id(self)] = twin
        return twin

    def __repr__(self) -> str:
        return f"GossipOptimizer({self.optimizer!r}, {self.comm!r}, {self.sync!r})"
