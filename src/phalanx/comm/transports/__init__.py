"""Transports carry bytes between ranks. torch.distributed, threads and shared memory differ only below this interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from phalanx.schedule import Collective, Schedule


class TransportError(RuntimeError):
    """Messages did not get through: a connection broke, or the engine's own timeout expired."""


class Message(NamedTuple):
    """A contiguous tensor, and the rank that receives or sends it."""

    peer: int
    tensor: torch.Tensor


class MessagesOnly:
    """Base of a transport without library calls. Schedules run on it as Moves."""

    library = cold = False

    def prepare(self, schedule: Schedule, ranks: Sequence[int]) -> None:
        pass

    def warm_up(self, x: torch.Tensor) -> None:
        pass

    def calls(self, call: Collective, x: torch.Tensor, ranks: Sequence[int]) -> bool:
        return False

    def collective(self, call: Collective, x: torch.Tensor, op: str, ranks: Sequence[int]) -> None:
        raise NotImplementedError("this transport has messages only; lower the schedule first")

    def close(self) -> None:
        pass


class Transport(Protocol):
    """Point-to-point messages, and library collectives if the engine prefers them.

    A failure of the network is a `TransportError`. Any other exception counts as an error of the operation itself.
    """

    library: bool  # whether NCCL carries tensors on GPUs, whose operations the caller queues in the order of its calls

    @property
    def address(self) -> str:
        """The address at which other ranks can reach this one."""

    @property
    def device(self) -> torch.device | None:
        """The GPU that receives tensors from other ranks' GPUs: the one of the calling thread."""

    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Any:
        """Start to send and receive all of these together, and return what to `wait` for. Empty messages are not sent.

        Messages of one pair and tag keep their order. A message matches only a receive with the same tag.
        """

    def wait(self, posted: Any, *, for_ever: bool = False) -> None:
        """Wait until these messages were received and sent. Blocks, but on a GPU only orders the stream.

        `for_ever`: without the engine's own timeout, which would break all connections.
        """

    def prepare(self, schedule: Schedule, ranks: Sequence[int]) -> None:
        """Create what `collective` needs to run this schedule among `ranks`. All ranks of the world call it, in one order."""

    @property
    def cold(self) -> bool:
        """Whether `prepare` created NCCL groups that are not connected yet."""

    def warm_up(self, x: torch.Tensor) -> None:
        """Connect them, with a tensor on this rank's GPU. NCCL builds its rings at the first call, which may take seconds."""

    def calls(self, call: Collective, x: torch.Tensor, ranks: Sequence[int]) -> bool:
        """Whether `call` on tensors like `x` is one library call here. Otherwise it is lowered to Moves."""

    def collective(self, call: Collective, x: torch.Tensor, op: str, ranks: Sequence[int]) -> None:
        """Make one library call in the group, in place on `x`, which holds the group's chunks."""

    def can_carry(self, x: torch.Tensor) -> bool:
        """Whether tensors on the device of `x` are sent directly. Others go through host memory."""

    def close(self) -> None:
        """Release all resources. Idempotent."""
