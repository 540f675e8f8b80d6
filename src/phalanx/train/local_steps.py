"""The settings `comm.local.*` of local steps, for comm.sync=local-sgd or diloco."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from phalanx.grad.local import DiLoCo, LocalSGD
from phalanx.train.settings import setting


@dataclass(frozen=True, kw_only=True)
class LocalConfig:
    """How many steps ranks train locally, and how they synchronise."""

    every: int = setting(50, "Steps of each rank by itself between two outer steps of the same parameter.")
    fragments: int = setting(1, "Parts of the parameters that are sent in turn.")
    overlap: int = setting(0, "Steps that a part is in flight while training continues; 0 waits for it.")
    outer_rate: float = setting(0.7, "diloco: learning rate of the outer optimizer, SGD.")
    outer_momentum: float = setting(0.9, "diloco: its momentum.")
    outer_nesterov: bool = setting(True, "diloco: use Nesterov momentum.")
    partners: Literal["all", "random"] = setting(
        "all", "diloco: make outer steps with all ranks, or with one drawn anew each time."
    )
    seed: int = setting(0, "diloco: seed of that draw.")
    level: Literal["rank", "host"] | None = setting(
        None,
        "Let every rank take local steps, or the ranks of a host act as one; none for hosts where several hold several ranks.",
    )

    start: int = setting(0, "Steps in which all ranks average their gradients, before the first local step.")

    def __post_init__(self) -> None:
        self.of("diloco")

    def of(self, sync: str) -> LocalSGD | DiLoCo:
        """The `sync` argument for the optimizer."""
        if sync == "local-sgd":
            return LocalSGD(self.every, self.fragments, self.overlap, self.level, self.start)
        outer = {"lr": self.outer_rate, "momentum": self.outer_momentum, "nesterov": self.outer_nesterov}
        draw: dict[str, Any] = {"partners": self.partners, "seed": self.seed}
        return DiLoCo(self.every, outer, self.fragments, self.overlap, level=self.level, start=self.start, **draw)
