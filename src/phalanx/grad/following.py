"""How an optimizer follows the membership of an elastic job: what it has seen of it, and which loader shares the samples out."""

from __future__ import annotations

from typing import Any

from phalanx.comm.communicator import Communicator
from phalanx.comm.elastic.communicator import ElasticCommunicator


class Following:
    """What one optimizer has seen of the membership, and its loader."""

    def __init__(self, comm: ElasticCommunicator) -> None:
        self.comm = comm
        self.loader: Any = None  # which shares the samples out, if it is ours
        self.seen = comm.membership.epoch  # the last membership that hooks of the optimizer were called for

    @property
    def batch_share(self) -> float:
        """The current batch as a share of the planned one. The learning rate follows it."""
        return 1.0 if self.loader is None else float(self.loader.world.batch_share)


def follow(comm: Communicator) -> Following:
    """How an optimizer of this elastic communicator follows it."""
    assert isinstance(comm, ElasticCommunicator)
    return Following(comm)
