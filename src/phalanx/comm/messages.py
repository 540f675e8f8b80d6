"""Messages: tensors whose shape the receiver does not know, from one to all, from all to one, between two.

Third layer of a communicator. A header says what comes; `exchange_async`, for neighbours that know each other's sizes, has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from phalanx.comm.arguments import check_in_place, check_list, check_peer, check_rank, check_tag, check_tensor, text_of
from phalanx.comm.envelope import HEADER, announced, describes, header_of, is_plain, plain
from phalanx.comm.failure import CommunicationError
from phalanx.comm.issuer import Pending
from phalanx.comm.operations import WINDOW, tag_of
from phalanx.comm.reductions import Reductions
from phalanx.comm.transports import Message
from phalanx.native.core import TYPES
from phalanx.schedule import Schedule, binomial, scatter_gather

BCAST_TREE = 64 << 10  # bytes up to which a broadcast sends the whole along a tree rather than parts


def _misfit(ranks: Sequence[int], offers: Sequence[str], root: int, sent: str) -> str:
    told = "; ".join(f"rank {rank} offered {offer} to fill" for rank, offer in zip(ranks, offers))
    return f"bcast: root {root} sent {sent}, but {told}"


class Messages(Reductions):
    """Tensors from one rank to others, as they are."""

    def _ready(self, algorithm: Schedule | None, *, shared: bool) -> None:
        super()._ready(algorithm, shared=shared)
        self._broadcasts: dict[tuple[str, int], Schedule] = {}

    def bcast(self, x: torch.Tensor | None, root: int = 0) -> torch.Tensor:
        """The tensor of `root`, on all ranks. Receivers pass None, or a tensor of its shape and dtype to be filled."""
        check_rank(root, "root", self.size)
        if self.rank == root or x is not None:
            check_tensor(x)
        if x is not None and self.rank != root:
            check_in_place(x)

        def work(tag: int) -> torch.Tensor:
            header = header_of(x) if self.rank == root and x is not None else torch.empty(HEADER, dtype=torch.int64)
            self._spread(header, root, tag)
            self._check_offers(x, header, root, tag)
            out = x.detach() if x is not None and describes(header, x) else announced(header)
            flat = plain(out if self._transport.can_carry(out) else out.cpu()).view(-1)
            self._spread(flat.view(torch.uint8), root, tag)
            if self.rank != root and flat.data_ptr() != out.data_ptr():
                out.copy_(flat.view(out.shape))
            if x is None:
                return out
            if not describes(header, x):  # only now: the others were waiting for this rank's part
                raise ValueError(_misfit([self.rank], [text_of(x)], root, text_of(out)))
            return x

        return self._start(f"bcast(root {root})", work, [] if x is None else [x]).wait()

    def _spread(self, flat: torch.Tensor, root: int, tag: int) -> None:
        """A flat buffer of `root` to all, in place."""
        if self._team is not None and self.inter_size == 1 and flat.is_cpu and flat.dtype in TYPES:
            self._team.broadcast(flat, root)
        elif flat.nbytes <= BCAST_TREE or self.size == 2:
            self._run(self._broadcasting(binomial, root), flat, "sum", tag)
        else:
            self._run(self._broadcasting(scatter_gather, root), flat, "sum", tag)

    def _check_offers(self, x: torch.Tensor | None, header: torch.Tensor, root: int, tag: int) -> None:
        """Raise on all ranks if one offered a tensor that the root's does not fit, where it costs little to ask, or to debug."""
        fits = x is None or describes(header, x)
        offer = "" if fits or x is None else text_of(x)
        if self._team is not None and self.inter_size == 1:
            if self._team.all_reduce(torch.tensor([fits], dtype=torch.uint8), "min").item():
                return
            offers = self._team.tell(offer)
        elif self._debug and self.size > 1:
            offers = self._tell(offer, tag)
        else:
            return
        odd = [rank for rank in range(self.size) if offers[rank]]
        if not odd:
            return
        words = _misfit(odd, [offers[rank] for rank in odd], root, text_of(announced(header)))
        if not fits:
            raise ValueError(words)
        raise CommunicationError(words, operation=f"bcast(root {root})", missing=odd)

    def gather(self, x: torch.Tensor, root: int = 0) -> list[torch.Tensor] | None:
        """The tensors of all ranks as a list at `root`, None elsewhere. Shapes may differ."""
        check_rank(root, "root", self.size)
        check_tensor(x)
        others = self._others()

        def work(tag: int) -> list[torch.Tensor] | None:
            if self.rank != root:
                self._swap({root: x}, [], tag)
                return None
            return self._in_order(x, self._swap({}, others, tag))

        return self._start(f"gather(root {root})", work, [x], compare=True).wait()

    def allgather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks as a list, on all ranks. Shapes may differ."""
        check_tensor(x)
        others = self._others()
        return self._start(
            "allgather()", lambda tag: self._in_order(x, self._swap(dict.fromkeys(others, x), others, tag)), [x], compare=True
        ).wait()

    def scatter(self, xs: Sequence[torch.Tensor] | None, root: int = 0) -> torch.Tensor:
        """Rank i gets xs[i] of `root`. Others pass None. Shapes may differ."""
        check_rank(root, "root", self.size)
        if self.rank == root:
            check_list(xs, "scatter", "the root passes", self.size)
        elif xs is not None:
            raise ValueError(f"scatter: rank {self.rank} passes None, because root is {root}")

        def work(tag: int) -> torch.Tensor:
            if xs is None:
                return self._swap({}, [root], tag)[root]
            self._swap({i: xs[i] for i in self._others()}, [], tag)
            return xs[root].detach().clone()

        return self._start(f"scatter(root {root})", work, xs or [], compare=True).wait()

    def alltoall(self, xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Rank i sends xs[j] to rank j and gets a list whose element j came from rank j. Shapes may differ."""
        check_list(xs, "alltoall", "every rank passes", self.size)
        others = self._others()

        def work(tag: int) -> list[torch.Tensor]:
            return self._in_order(xs[self.rank], self._swap({i: xs[i] for i in others}, others, tag))

        return self._start("alltoall()", work, xs, compare=True).wait()

    def send(self, x: torch.Tensor, dest: int, tag: int = 0) -> None:
        """Send `x`; returns when `dest` has begun to receive it. Messages of one pair and tag arrive in order."""
        check_tensor(x)
        check_peer(dest, "dest", self.size, self.rank)
        check_tag(tag)
        work = lambda wire_tag: self._swap({dest: x}, [], wire_tag)  # noqa: E731
        self._start(f"send(to {dest}, tag {tag})", work, [x], pair=(self.rank, dest, tag)).wait()

    def recv(self, source: int, tag: int = 0) -> torch.Tensor:
        """The next tensor from `source`, with the shape and dtype it had there."""
        check_peer(source, "source", self.size, self.rank)
        check_tag(tag)
        work = lambda wire_tag: self._swap({}, [source], wire_tag)[source]  # noqa: E731
        return self._start(f"recv(from {source}, tag {tag})", work, pair=(source, self.rank, tag)).wait()

    def exchange_async(
        self, x: torch.Tensor, dest: int, out: torch.Tensor, source: int, tag: int = 0, *, may_fail: bool = False
    ) -> Pending:
        """Start to send `x` to `dest` and to fill `out` from `source`; leave both alone until `wait()`, which returns `out`.

        For neighbours that know each other's sizes: contiguous tensors, no header, the receive posted first; an empty tensor is
        not sent. A slow neighbour holds nothing else up: what is called later does not wait for the exchange, only `wait()` does.
        With `may_fail` a neighbour that has died breaks this exchange and nothing else: `settle(seconds)` instead of `wait()`.
        """
        for tensor in (x, out):
            check_tensor(tensor)
            if not is_plain(tensor) or not self._transport.can_carry(tensor):
                raise ValueError(
                    f"exchange_async: contiguous tensors on a device of the backend are wanted, got {text_of(tensor)} on "
                    f"{tensor.device}"
                )
        if x.device != out.device:
            raise ValueError(f"exchange_async: one tensor is on {x.device}, the other on {out.device}")
        check_peer(dest, "dest", self.size, self.rank)
        check_peer(source, "source", self.size, self.rank)
        check_tag(tag)
        outgoing, incoming = Message(self._ranks[dest], x.detach().view(-1)), Message(self._ranks[source], out.detach().view(-1))
        posted: list[Any] = []

        def work(_: int) -> torch.Tensor:
            if x.is_cuda:  # NCCL matches by order instead of tags, wants both in one call, and its wait does not block
                self._transport.wait(self._transport.post([outgoing], [incoming], 0))
            else:
                # the size is in the tag: a message never meets a receive that is too small for it
                receive_tag = tag_of(self._name, "exchange", source, self.rank, tag, out.nbytes)
                posted.append(self._transport.post([], [incoming], receive_tag))
                send_tag = tag_of(self._name, "exchange", self.rank, dest, tag, x.nbytes)
                posted.append(self._transport.post([outgoing], [], send_tag))
            return out

        def land() -> None:
            for messages in posted:
                self._transport.wait(messages, for_ever=may_fail)

        # one name on all ranks, without peers: by it the watch knows that they wait in the same operation
        return self._start(f"exchange(tag {tag})", work, [x, out], pair=(source, dest, tag), landing=land, may_fail=may_fail)

    def _swap(self, outgoing: dict[int, torch.Tensor], incoming: Sequence[int], tag: int) -> dict[int, torch.Tensor]:
        """Send each peer its tensor and receive one from each of `incoming`: first the headers, then what they announce.

        Peers are taken by distance, the same on both ends of a message, a window of them at a time: no rank waits for one that
        waits for it, and a thousand ranks do not all write to rank 0 first.
        """
        received: dict[int, torch.Tensor] = {}
        for first in range(1, self.size, WINDOW):
            distances = range(first, min(first + WINDOW, self.size))
            to = [peer for k in distances if (peer := (self.rank + k) % self.size) in outgoing]
            source = [peer for k in distances if (peer := (self.rank - k) % self.size) in incoming]
            headers = {peer: torch.empty(HEADER, dtype=torch.int64) for peer in source}
            self._exchange({peer: header_of(outgoing[peer]) for peer in to}, headers, tag)
            landing = {peer: announced(header) for peer, header in headers.items()}
            self._exchange({peer: plain(outgoing[peer].detach()).view(-1) for peer in to}, landing, tag)
            received |= landing
        return received

    def _in_order(self, mine: torch.Tensor, received: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        return [mine.detach().clone() if rank == self.rank else received[rank] for rank in range(self.size)]

    def _broadcasting(self, make: Callable[[int, int], Schedule], root: int) -> Schedule:
        key = (make.__name__, root)
        if key not in self._broadcasts:
            self._broadcasts[key] = make(self.size, root)
        return self._broadcasts[key]
