"""Decides which errors of torch.distributed are network failures. Only this file reads torch's messages."""

from __future__ import annotations

import re
from types import TracebackType

import torch

from phalanx.comm.transports import TransportError


class network:  # noqa: N801  reads as a statement: with network()
    """Turns errors of torch.distributed inside this block into TransportErrors. A class, because there is a block per message."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        # gloo raises a plain RuntimeError, NCCL a subclass; torch.distributed can also run out of memory
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            raise TransportError(gist(error)) from error


def gist(error: BaseException) -> str:
    """Return gloo's message without its source line and advice: `[/path/pair.cc:553] Connection closed by ...`."""
    return re.sub(r"^\[\S+:\d+\] ", "", str(error).strip()).split("\n")[0].split(". ")[0]


def is_timeout(error: BaseException) -> bool:
    """Whether a wait of gloo timed out. gloo has no error type for that."""
    return "Timed out" in str(error)
