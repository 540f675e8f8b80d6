"""GossipGraD as a value: what `create_multi_node_optimizer(sync=...)` takes instead of `AllReduce()`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from phalanx.comm.communicator import Communicator


@dataclass(frozen=True, slots=True)
class Gossip:
    """Mix replicas with one partner per step (GossipGraD), for `create_multi_node_optimizer(sync=...)`.

    Replicas may differ. `opt.average_()` makes them equal.

    Args:
        topology: `"dissemination"` sends to rank r - 2**k and receives from r + 2**k in step k of a period, for any number of
            ranks. `"hypercube"` exchanges with r XOR 2**k, for powers of two. `"exact"` pairs ranks with weights that make a
            period's steps the exact mean, for any number of ranks.
        rotate: Shuffle the ranks after every period. A period has ceil(log2 p) steps, or with `"exact"` at most 2 log2 p + 1.
        exchange: `"weights"` mixes parameters and optimizer state after the update. `"gradients"` mixes gradients before it.
        level: `"rank"`, or `"host"`: the ranks of a host average their gradients as with `AllReduce`, and each carries a share
            of what the hosts exchange. None is `"host"` where several hosts hold several ranks.
        overlap: Exchange during the next forward and backward. False waits for the exchange in `step`.
        average_every: Replace all replicas by their exact mean after this many steps.
        seed: Seeds the shuffles. All ranks pass the same.
        patience: Seconds to wait for a partner before the rank continues without that exchange. None takes 4 usual steps, at
            least 1 s.

    Raises:
        ValueError: If an option makes no sense.
        TypeError: If an option has the wrong type.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> opt = phalanx.create_multi_node_optimizer(sgd, comm, sync=phalanx.Gossip(average_every=100))
    """

    topology: Literal["dissemination", "hypercube", "exact"] = "dissemination"
    rotate: bool = True
    exchange: Literal["weights", "gradients"] = "weights"
    level: Literal["rank", "host"] | None = None
    overlap: bool = True
    average_every: int | None = None
    seed: int = 0
    patience: float | None = None

    def __post_init__(self) -> None:
        for name, choices in (
            ("topology", ("dissemination", "hypercube", "exact")),
            ("exchange", ("weights", "gradients")),
            ("level", ("rank", "host", None)),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"Gossip({name}={getattr(self, name)!r}): one of {', '.join(map(repr, choices))}")
        for name in ("rotate", "overlap"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"Gossip({name}={getattr(self, name)!r}): True or False")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise TypeError(f"Gossip(seed={self.seed!r}): an int, the same on all ranks")
        every = self.average_every
        if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
            raise ValueError(f"Gossip(average_every={every!r}): a number of steps, at least 1, or None for never")
        if self.patience is not None and not self.patience > 0:
            raise ValueError(f"Gossip(patience={self.patience!r}): seconds, more than 0, or None to measure")


def level_of(comm: Communicator, sync: Gossip) -> str:
    """Who gossips: ranks, or hosts whose ranks act as one."""
    if comm.elastic:  # it cannot be split
        return "rank"
    return sync.level or ("host" if comm.size > comm.inter_size > 1 else "rank")
