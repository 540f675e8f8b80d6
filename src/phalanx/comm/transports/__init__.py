"""What carries bytes between ranks: the seam below which torch.distributed, threads and shared memory differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from phalanx.schedule import Collective, Schedule


class TransportError(RuntimeError):
    """Messages did not get through: a connection broke, or the engine's own time limit ran out."""


class Message(NamedTuple):
    """A contiguous tensor and the rank it goes to or comes from."""

    peer: int
    tensor: torch.Tensor


class MessagesOnly:
    """What a transport has that makes no library calls: a schedule runs on it as Moves."""

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
    """Point-to-point messages, and library collectives where the engine prefers them.

    A failure of the network is a `TransportError`. Any other exception counts as an error of the work itself.
    """

    library: bool  # whether NCCL carries tensors on GPUs: their operations are queued, in the order of the calls, by the caller

    @property
    def address(self) -> str:
        """Where the other ranks can reach this one."""

    @property
    def device(self) -> torch.device | None:
        """The GPU on which tensors from other ranks' GPUs land: that of the calling thread."""

    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Any:
        """Begin to send and receive all of these together; `wait` for what it returns. Empty messages are not sent.

        Messages of one pair and tag keep their order. A message meets a receive of the same tag, and of no other.
        """

    def wait(self, posted: Any, *, for_ever: bool = False) -> None:
        """Until these messages have arrived and left. Blocks, but on a GPU only orders the stream.

        `for_ever`: without the engine's own limit, whose end breaks all connections.
        """

    def prepare(self, schedule: Schedule, ranks: Sequence[int]) -> None:
        """Make what `collective` will need to run this schedule among `ranks`; called by all ranks of the world, in one order."""

    @property
    def cold(self) -> bool:
        """Whether `prepare` made groups of NCCL that are not connected yet."""

    def warm_up(self, x: torch.Tensor) -> None:
        """Connect them, with a tensor on this rank's GPU: NCCL builds its rings at the first call, which may take seconds."""

    def calls(self, call: Collective, x: torch.Tensor, ranks: Sequence[int]) -> bool:
        """Whether `call` on tensors like `x` is one library call here; otherwise it is lowered to Moves."""

    def collective(self, call: Collective, x: torch.Tensor, op: str, ranks: Sequence[int]) -> None:
        """One library call by the group, in place on `x`, the group's chunks."""

    def can_carry(self, x: torch.Tensor) -> bool:
        """Whether tensors on the device of `x` travel directly; others go through host memory."""

    def close(self) -> None:
        """Give back what was taken; idempotent."""
