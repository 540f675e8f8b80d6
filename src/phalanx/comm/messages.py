"""Messages: tensors from all ranks to one, from one to all, or between two.

The receiver does not know the shape, so a header announces it. `exchange_async` has none: its ranks know each other's sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from phalanx.comm.arguments import check_list, check_peer, check_rank, check_tag, check_tensor, text_of
from phalanx.comm.envelope import HEADER, announced, header_of, is_plain, plain
from phalanx.comm.operations import Operations, tag_of
from phalanx.comm.peers import WINDOW
from phalanx.comm.pending import Pending
from phalanx.comm.transports import Message


def gather(operations: Operations, x: torch.Tensor, root: int) -> list[torch.Tensor] | None:
    """`Communicator.gather`."""
    members, device = operations.members, operations.transport.device
    check_rank(root, "root", members.size)
    check_tensor(x)

    def work(tag: int) -> list[torch.Tensor] | None:
        if members.rank != root:
            _swap(operations, {root: x}, [], tag, device)
            return None
        return _in_order(operations, x, _swap(operations, {}, members.others, tag, device))

    return operations.start(f"gather(root {root})", work, [x], compare=True).wait()


def allgather(operations: Operations, x: torch.Tensor) -> list[torch.Tensor]:
    """`Communicator.allgather`."""
    check_tensor(x)
    others, device = operations.members.others, operations.transport.device

    def work(tag: int) -> list[torch.Tensor]:
        return _in_order(operations, x, _swap(operations, dict.fromkeys(others, x), others, tag, device))

    return operations.start("allgather()", work, [x], compare=True).wait()


def scatter(operations: Operations, xs: Sequence[torch.Tensor] | None, root: int) -> torch.Tensor:
    """`Communicator.scatter`."""
    members, device = operations.members, operations.transport.device
    check_rank(root, "root", members.size)
    if members.rank == root:
        check_list(xs, "scatter", "the root passes", members.size)
    elif xs is not None:
        raise ValueError(f"scatter: rank {members.rank} must pass None, because the root is rank {root}")

    def work(tag: int) -> torch.Tensor:
        if xs is None:
            return _swap(operations, {}, [root], tag, device)[root]
        _swap(operations, {i: xs[i] for i in members.others}, [], tag, device)
        return xs[root].detach().clone()

    return operations.start(f"scatter(root {root})", work, xs or [], compare=True, device=device).wait()


def alltoall(operations: Operations, xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`Communicator.alltoall`."""
    members, device = operations.members, operations.transport.device
    check_list(xs, "alltoall", "every rank passes", members.size)
    others = members.others

    def work(tag: int) -> list[torch.Tensor]:
        return _in_order(operations, xs[members.rank], _swap(operations, {i: xs[i] for i in others}, others, tag, device))

    return operations.start("alltoall()", work, xs, compare=True).wait()


def send(operations: Operations, x: torch.Tensor, dest: int, tag: int) -> None:
    """`Communicator.send`."""
    members = operations.members
    check_tensor(x)
    check_peer(dest, "dest", members.size, members.rank)
    check_tag(tag)
    work = lambda wire_tag: _swap(operations, {dest: x}, [], wire_tag, None)  # noqa: E731
    operations.start(f"send(to {dest}, tag {tag})", work, [x], pair=(members.rank, dest, tag)).wait()


def recv(operations: Operations, source: int, tag: int) -> torch.Tensor:
    """`Communicator.recv`."""
    members, device = operations.members, operations.transport.device
    check_peer(source, "source", members.size, members.rank)
    check_tag(tag)
    work = lambda wire_tag: _swap(operations, {}, [source], wire_tag, device)[source]  # noqa: E731
    return operations.start(f"recv(from {source}, tag {tag})", work, pair=(source, members.rank, tag), device=device).wait()


def exchange_async(
    operations: Operations, x: torch.Tensor, dest: int, out: torch.Tensor, source: int, tag: int, *, may_fail: bool
) -> Pending:
    """`Communicator.exchange_async`."""
    members, transport = operations.members, operations.transport
    for tensor in (x, out):
        check_tensor(tensor)
        if not is_plain(tensor) or not transport.can_carry(tensor):
            raise ValueError(
                f"exchange_async needs contiguous tensors on a device of the backend, got {text_of(tensor)} on {tensor.device}"
            )
    if x.device != out.device:
        raise ValueError(f"exchange_async needs both tensors on one device, got {x.device} and {out.device}")
    check_peer(dest, "dest", members.size, members.rank)
    check_peer(source, "source", members.size, members.rank)
    check_tag(tag)
    outgoing = Message(members.ranks[dest], x.detach().view(-1))
    incoming = Message(members.ranks[source], out.detach().view(-1))
    posted: list[Any] = []

    def work(_: int) -> torch.Tensor:
        if x.is_cuda:  # NCCL matches by order instead of tags, needs both in one call, and its wait does not block
            transport.wait(transport.post([outgoing], [incoming], 0))
        else:
            # the size is part of the tag, so that a message never matches a receive that is too small for it
            receive_tag = tag_of(members.name, "exchange", source, members.rank, tag, out.nbytes)
            posted.append(transport.post([], [incoming], receive_tag))
            send_tag = tag_of(members.name, "exchange", members.rank, dest, tag, x.nbytes)
            posted.append(transport.post([outgoing], [], send_tag))
        return out

    def land() -> None:
        for messages in posted:
            transport.wait(messages, for_ever=may_fail)

    # the name has no peers, so it is the same on all ranks, and the watch sees that they wait in the same operation
    name, pair = f"exchange(tag {tag})", (source, dest, tag)
    return operations.start(name, work, [x, out], pair=pair, landing=land, may_fail=may_fail, queued=True)


def _swap(
    operations: Operations, outgoing: dict[int, torch.Tensor], incoming: Sequence[int], tag: int, device: torch.device | None
) -> dict[int, torch.Tensor]:
    """Send each peer its tensor and receive one from each of `incoming`: first the headers, then the tensors they announce.

    A CUDA tensor arrives on `device`, the one of the calling thread, because the issuing thread may use another one.

    Peers are served by distance, one window at a time, which is the same on both ends of a message. So no two ranks wait for
    each other, and a thousand ranks do not all write to rank 0 first.
    """
    rank, size = operations.members.rank, operations.members.size
    received: dict[int, torch.Tensor] = {}
    for first in range(1, size, WINDOW):
        distances = range(first, min(first + WINDOW, size))
        to = [peer for k in distances if (peer := (rank + k) % size) in outgoing]
        source = [peer for k in distances if (peer := (rank - k) % size) in incoming]
        headers = {peer: torch.empty(HEADER, dtype=torch.int64) for peer in source}
        operations.peers.exchange({peer: header_of(outgoing[peer]) for peer in to}, headers, tag)
        landing = {peer: announced(header, device) for peer, header in headers.items()}
        operations.peers.exchange({peer: plain(outgoing[peer].detach()).view(-1) for peer in to}, landing, tag)
        received |= landing
    return received


def _in_order(operations: Operations, mine: torch.Tensor, received: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    members = operations.members
    return [mine.detach().clone() if rank == members.rank else received[rank] for rank in range(members.size)]
