"""Messages on a gloo group of its own, beside the default group of torch.distributed: no tag meets one of yours."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from phalanx.comm.streams import current_device
from phalanx.comm.transports import Message, MessagesOnly, TransportError
from phalanx.comm.transports.torch.errors import gist, is_timeout
from phalanx.comm.transports.torch.transport import CUT, gloo_listens_on, pieces


class GlooTransport(MessagesOnly):
    """`gloo` is a ProcessGroupGloo. Tensors on a GPU travel through host memory."""

    address = ""

    def __init__(self, gloo: Any, timeout: float) -> None:
        self._gloo: Any = gloo
        self._limit = datetime.timedelta(seconds=timeout)
        self.got_on: Callable[[], None] = lambda: None  # called after every message: a long transfer that moves is not a hang

    @property
    def device(self) -> torch.device | None:
        return current_device()

    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Any:
        # receives first: on one gloo pair a send that is posted first makes the exchange half-duplex
        gloo, posted = self._group(), list[tuple[int, str, Any]]()
        try:
            posted += [(m.peer, "receive from", gloo.recv([x], m.peer, tag)) for m in receives for x in pieces(m.tensor)]
            posted += [(m.peer, "send to", gloo.send([x], m.peer, tag)) for m in sends for x in pieces(m.tensor)]
        except RuntimeError as error:
            posted, gloo = [], None  # an error keeps this frame, and a message keeps its connections and their thread
            raise TransportError(gist(error)) from error
        return posted

    def wait(self, posted: Any, *, for_ever: bool = False) -> None:
        peer, way, work = -1, "", None
        posted.reverse()
        try:
            while posted:
                peer, way, work = posted.pop()
                work.wait(self._limit)
                self.got_on()
        except RuntimeError as error:
            posted.clear()
            work = None
            raise TransportError(f"{way} rank {peer}: {gist(error)}") from error

    def _group(self) -> Any:
        if self._gloo is None:
            raise TransportError("its connections are closed")
        return self._gloo

    def can_carry(self, x: torch.Tensor) -> bool:
        return x.is_cpu

    def cut(self) -> None:
        """Break all connections, so that a thread which waits in `wait` returns with an error."""
        # torch has no call for it, but gloo closes all connections of a group in which one wait runs out of time
        gloo = self._gloo
        for peer in range(gloo.size() if gloo is not None else 0):
            if peer != gloo.rank():
                try:
                    gloo.recv([torch.empty(1)], peer, CUT).wait(datetime.timedelta(milliseconds=1))
                except RuntimeError as error:
                    if is_timeout(error):
                        return  # otherwise this peer's connection was broken already: try the next

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.cut()

    def free(self) -> None:
        """After `close`: end gloo's threads and close its sockets now, and not when the garbage collector comes."""
        self._gloo = None


def make_gloo(store: Any, rank: int, size: int, *, interface: str | None, timeout: float) -> Any:
    """A gloo group of `size` ranks that meet at `store`. All of them call it, within `timeout`."""
    with gloo_listens_on(interface):
        return dist.ProcessGroupGloo(store, rank, size, timeout=datetime.timedelta(seconds=timeout))
