"""Synchronous data parallelism as a value, for `create_multi_node_optimizer(sync=...)`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Average gradients over all ranks in every step: synchronous data parallelism, for `create_multi_node_optimizer(sync=...)`.

    Args:
        growing: Fujitsu's groups of gradients, whose k-th boundary is after growing * k**3 tensors, instead of groups of equal
            bytes.
        overlap: Send groups while backward runs. None measures both ways in the first steps and keeps the faster. With None,
            ranks of one host do not overlap if their gradients are smaller than 20 MiB or if backward keeps all cores busy.
        weighted: Take the mean over samples instead of over ranks. Set `opt.weight` to the size of each local batch.
        record: Keep times for `opt.report()`.
        fused: Update the parameters while the gradients are summed. Parameters and moments then exist once per host, and
            `p.grad` stays this rank's own gradient. For torch.optim.SGD, Adam, AdamW and phalanx.Lars in float32, with all ranks
            on one host; otherwise you get one warning and the plain step.
        check_every: Compare the parameters and the optimizer state of the ranks after this many steps. 0 never does.
        on_difference: What to do if they differ, for example because a bit flipped in memory. `"stop"` raises `ReplicaError`,
            which names the rank. `"heal"` copies what differs from the majority, warns, and continues. Two ranks have no
            majority, so both stop.
        on_slow: With `elastic=True`, what to do about a rank that is slow in 20 steps: `"warn"` names it and the cause;
            `"rebalance"` also shares the samples of a `phalanx.data.Loader` out by speed, and weighs gradients by samples, so
            that the mean stays exact; `"evict"` ends it; `"ignore"` measures nothing.

    Raises:
        ValueError: If `growing`, `check_every`, `on_difference` or `on_slow` is invalid.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> sync = phalanx.AllReduce(check_every=1000)
        >>> opt = phalanx.create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm, sync=sync)
    """

    growing: int | None = None
    overlap: bool | None = None
    weighted: bool = False
    record: bool = False
    fused: bool = False
    check_every: int = 100
    on_difference: Literal["stop", "heal"] = "stop"
    on_slow: Literal["warn", "rebalance", "evict", "ignore"] = "warn"

    def __post_init__(self) -> None:
        if self.growing is not None and (not isinstance(self.growing, int) or self.growing < 1):
            raise ValueError(f"growing={self.growing!r}: the number of tensors of the first group, at least 1, or None")
        if not isinstance(self.check_every, int) or self.check_every < 0:
            raise ValueError(f"check_every={self.check_every!r}: a number of steps, or 0 for never")
        if self.on_difference not in ("stop", "heal"):
            raise ValueError(f"on_difference={self.on_difference!r}: stop or heal")
        if self.on_slow not in ("warn", "rebalance", "evict", "ignore"):
            raise ValueError(f"on_slow={self.on_slow!r}: warn, rebalance, evict or ignore")
