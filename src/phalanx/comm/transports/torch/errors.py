"""Which errors of torch.distributed are failures of the network. The only place that reads torch's words."""

from __future__ import annotations

import re
from types import TracebackType

import torch

from phalanx.comm.transports import TransportError


class network:  # noqa: N801  reads as a statement: with network()
    """Errors of torch.distributed inside of this block become TransportErrors. A class: a block is entered per message."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        # gloo raises a plain RuntimeError, NCCL a subclass; memory can run out inside of torch.distributed, too
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            raise TransportError(gist(error)) from error


def gist(error: BaseException) -> str:
    """What gloo says, without its source line before and its advice after: `[/path/pair.cc:553] Connection closed by ...`."""
    return re.sub(r"^\[\S+:\d+\] ", "", str(error).strip()).split("\n")[0].split(". ")[0]


def is_timeout(error: BaseException) -> bool:
    """Whether a wait of gloo ran out of time; gloo has no error type for that."""
    return "Timed out" in str(error)
