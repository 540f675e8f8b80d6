"""How the ranks of a run communicate, and what happens when some of them die, join, or are slow: the settings `comm.*`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from phalanx.comm.communicator import Communicator
from phalanx.comm.settings import check_ranks, check_timeout
from phalanx.data.route import BatchPolicy
from phalanx.grad.allreduce import AllReduce
from phalanx.grad.gossip import Gossip
from phalanx.grad.wires import Int8, PowerSGD, Wire
from phalanx.optim.create import create_multi_node_optimizer
from phalanx.optim.gossip_step import GossipOptimizer
from phalanx.optim.local_step import LocalOptimizer
from phalanx.optim.multi_node import MultiNodeOptimizer
from phalanx.train.local_steps import LocalConfig
from phalanx.train.settings import setting

GOSSIP = {
    "topology": "Which partner a rank has: 2**k ranks away in step k of a period, across dimension k of a hypercube, or one of "
    "pairs whose steps make the exact mean.",
    "rotate": "Shuffle the ranks after every period, so that partners change.",
    "exchange": "Mix weights and optimizer state after the update, or gradients before it.",
    "level": "Let every rank gossip, or let the ranks of a host act as one; none for hosts where several hold several ranks.",
    "overlap": "Exchange during the next forward and backward; false waits for it in the step.",
    "average_every": "Steps after which all replicas become their exact mean; none for evaluations only.",
    "seed": "Seed of the rotation.",
    "patience": "Seconds to wait for a partner before continuing without it; none for 4 usual steps, at least 1 s.",
}

INT8 = {
    "block": "Numbers that share a scale, a multiple of 16.",
    "rounding": "To the nearest number, or up or down at random in proportion.",
    "error_feedback": "Add what was rounded away to the next gradient.",
    "level": "Encode what travels between hosts, or what travels between ranks.",
    "seed": "Seed of stochastic rounding.",
}

POWERSGD = {
    "rank": "Columns of the two thin matrices that a gradient becomes.",
    "start": "Steps at the beginning that are not compressed.",
    "seed": "Seed of the first directions.",
}


@dataclass(frozen=True, kw_only=True)
class CommConfig:
    """How ranks communicate."""

    sync: Literal["allreduce", "gossip", "local-sgd", "diloco"] = setting(
        "allreduce",
        "Average gradients over all ranks in every step; mix replicas with one partner per step; or let ranks train by "
        "themselves for comm.local.every steps. All but the first average replicas before evaluations.",
    )
    gossip: Gossip = setting(Gossip(), "GossipGraD, with comm.sync=gossip.", parts=GOSSIP)
    local: LocalConfig = setting(LocalConfig(), "Local steps, with comm.sync=local-sgd or diloco.")
    algorithm: str | None = setting(
        None, "All-reduce schedule: a name such as torus:2x4, or a file. None chooses one for the hosts found."
    )
    elastic: bool = setting(
        False, "Continue when ranks die, and let new ones join; `phalanx train --replace 10` starts up to ten."
    )
    min_ranks: int = setting(1, "With elastic: wait for replacements between two steps while there are fewer ranks.")
    max_ranks: int | None = setting(None, "With elastic: let no more ranks join than this; none for any number.")
    on_change: BatchPolicy = setting(
        "keep_batch", "With elastic: when ranks leave or join, keep the batch, or the share of each rank; then the rate follows."
    )
    check_every: int = setting(100, "Steps after which ranks compare their parameters and optimizer state; 0 for never.")
    on_difference: Literal["stop", "heal"] = setting(
        "stop", "If a rank differs, for example because a bit flipped in its memory: stop, or heal it from the others."
    )
    on_slow: Literal["warn", "rebalance", "evict", "ignore"] = setting(
        "warn", "With elastic, a rank that is slow: name it, also give it fewer samples, end it, or do not look."
    )
    timeout: float = setting(60.0, "Seconds that a rank waits for another one before the run fails.")
    wire: Literal["float16", "bfloat16", "int8", "powersgd"] | None = setting(
        None, "How gradients travel; none for their own type."
    )
    int8: Int8 = setting(Int8(), "8-bit gradients, with comm.wire=int8.", parts=INT8)
    powersgd: PowerSGD = setting(PowerSGD(), "Low-rank gradients, with comm.wire=powersgd.", parts=POWERSGD)
    bucket_bytes: int | None = setting(
        8 << 20, "Bytes of gradients that travel together. Fixed, so that a resumed run adds in the same order; none to measure."
    )
    growing: int | None = setting(
        None, "Group gradients as Fujitsu did, instead of by bytes: group k ends after growing * k**3 tensors."
    )
    overlap: bool | None = setting(None, "Send gradients during backward; none to measure both ways and keep the faster one.")
    fused: bool = setting(False, "Update weights while gradients are summed, if all ranks share a host.")
    double_buffering: bool = setting(
        False, "Apply the mean gradient of the step before, so that its exchange can take a whole step."
    )

    def __post_init__(self) -> None:
        check_timeout(self.timeout)
        if self.check_every < 0:
            raise ValueError(f"check_every={self.check_every}: 0 or more")
        for name in ("bucket_bytes", "growing"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: at least 1")
        if self.fused and (self.wire or self.double_buffering):
            raise ValueError("fused=True does not allow wire or double_buffering: nothing travels")
        self._check_elastic()
        if self.sync != "allreduce" and (self.fused or self.double_buffering or self.growing is not None):
            raise ValueError(f"sync={self.sync} does not allow fused, double_buffering or growing, which are for all-reduce")

        local = self.sync in ("local-sgd", "diloco")
        if self.wire in ("int8", "powersgd") and self.elastic:
            raise ValueError(f"wire={self.wire} does not work with elastic=True: use float16 or bfloat16")
        if self.wire == "powersgd" and self.sync != "allreduce":
            raise ValueError(f"wire=powersgd works only with sync=allreduce: with sync={self.sync} use float16 or bfloat16")
        if self.wire == "int8" and self.sync == "gossip":
            raise ValueError(
                "wire=int8 works only with sync=allreduce, local-sgd and diloco: with sync=gossip use float16 or bfloat16"
            )
        if self.wire is not None and local and self.local.partners == "random":
            raise ValueError(f"wire={self.wire} needs local.partners=all: one partner gets uncompressed parameters")

    def _check_elastic(self) -> None:
        if self.elastic:
            check_ranks(self.min_ranks, self.max_ranks)
            if self.fused:
                raise ValueError("elastic=True does not allow fused: gradients may be summed twice")
            if self.sync != "allreduce" and self.on_slow in ("rebalance", "evict"):
                raise ValueError(f"on_slow={self.on_slow} is for sync=allreduce")
            if self.sync in ("local-sgd", "diloco") and self.local.overlap:
                raise ValueError("elastic=True does not allow local.overlap: parts under way would be lost with a rank")
            if self.sync in ("local-sgd", "diloco") and self.local.start:
                raise ValueError("elastic=True does not allow local.start: leave it out")
            if self.sync == "gossip" and (self.gossip.topology == "hypercube" or self.gossip.patience is not None):
                raise ValueError("elastic=True does not allow gossip.topology=hypercube or gossip.patience: ranks come and go")
            level = self.gossip.level if self.sync == "gossip" else self.local.level if self.sync != "allreduce" else None
            if level == "host":
                raise ValueError("elastic=True does not allow level=host: its ranks cannot be split")
        elif self.on_slow in ("rebalance", "evict"):
            raise ValueError(f"on_slow={self.on_slow} is for elastic=True")
        elif self.min_ranks != 1 or self.max_ranks is not None or self.on_change != "keep_batch":
            raise ValueError("min_ranks, max_ranks and on_change are for elastic=True")

    def make_wire(self) -> Wire | None:
        """The wire as `create_multi_node_optimizer` takes it."""
        if self.wire is None:
            return None
        own: dict[str, Wire] = {"int8": self.int8, "powersgd": self.powersgd}
        return own.get(self.wire) or {"float16": torch.float16, "bfloat16": torch.bfloat16}[self.wire]

    def wrap(
        self, optimizer: torch.optim.Optimizer, comm: Communicator, *, weighted: bool
    ) -> MultiNodeOptimizer | GossipOptimizer | LocalOptimizer:
        """The multi-node optimizer; `weighted` if ranks may have different numbers of samples in a step."""
        if self.sync in ("local-sgd", "diloco"):
            return create_multi_node_optimizer(optimizer, comm, sync=self.local.of(self.sync), wire=self.make_wire())
        if self.sync == "gossip":
            return create_multi_node_optimizer(optimizer, comm, sync=self.gossip, wire=self.make_wire())
        return create_multi_node_optimizer(
            optimizer,
            comm,
            sync=AllReduce(
                growing=self.growing,
                overlap=self.overlap,
                weighted=weighted,
                record=True,
                fused=self.fused,
                check_every=self.check_every,
                on_difference=self.on_difference,
                on_slow=self.on_slow,
            ),
            double_buffering=self.double_buffering,
            wire=self.make_wire(),
            bucket_bytes=self.bucket_bytes if self.growing is None else None,
        )
