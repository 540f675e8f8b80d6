"""Synchronous data parallelism, as a value: what `create_multi_node_optimizer(sync=...)` takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Average gradients over all ranks.

    `growing`: Fujitsu's groups, whose k-th boundary is after growing * k**3 tensors, instead of groups of equal bytes. `overlap`:
    let groups leave during backward; None measures both ways in the first steps and keeps the faster. `weighted`: the mean over
    samples instead of over ranks; set `opt.weight` to the size of each local batch. `record`: keep times for `opt.report()`.
    `fused`: where all ranks are on one host, None keeps one replica of parameters and momentum for all of them, of which each
    updates its part, as long as nobody can notice; True updates it while the gradients are summed, which is faster, and leaves
    `p.grad` as it was. Both are for torch.optim.SGD and phalanx.Lars; where True cannot be done it is told once. False: every
    rank for itself. `check_every`: after every so many steps the ranks compare their parameters, and raise `ReplicaError` where
    they have become different; 0 never does.
    """

    growing: int | None = None
    overlap: bool | None = None
    weighted: bool = False
    record: bool = False
    fused: bool | None = None
    check_every: int = 100

    def __post_init__(self) -> None:
        if self.growing is not None and (not isinstance(self.growing, int) or self.growing < 1):
            raise ValueError(f"growing={self.growing!r}: the number of tensors of the first group, at least 1, or None")
        if not isinstance(self.check_every, int) or self.check_every < 0:
            raise ValueError(f"check_every={self.check_every!r}: a number of steps, or 0 for never")
