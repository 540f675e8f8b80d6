"""Hands the state of a training run to newcomers: plain data and tensors over our own verbs, verified. No pickle, no disk.

A state is what `state_dict()` returns: nested dicts, lists and tuples of plain values and tensors. The structure is sent first,
as plain data. Then the bytes of all tensors follow in pieces of 16 MiB, because most tensors are small, and a message for each
would take longer than the bytes. Both sides compute the checksum of a piece after it was sent, at the same time, and the receiver
compares them at the end.

Between hosts each newcomer gets messages of its own. On one host the ranks wait anyway, so all of them take part in a broadcast
through shared memory, which is faster, and those that have the state already forget what they hear.
"""

from __future__ import annotations

import hashlib
import random
import sys
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from phalanx.comm.communicator import Communicator
from phalanx.comm.envelope import bytes_of
from phalanx.comm.failure import CommunicationError

TAG = 0x5747  # of the messages that carry a state
PIECE = 16 << 20  # bytes of a message
COLUMNS = 509  # of words that a checksum adds up; a prime, so that tensors of equal size are not in equal columns


class StateDamagedError(CommunicationError):
    """What arrived is not what was sent."""


class Messages:
    """A way from one rank to another one, `peer`."""

    def __init__(self, comm: Communicator, peer: int) -> None:
        self._comm, self._peer = comm, peer
        self.source = peer

    def give(self, x: torch.Tensor) -> None:
        self._comm.send(x, self._peer, TAG)

    def take(self, nbytes: int) -> torch.Tensor:
        return self._comm.recv(self._peer, TAG).cpu()

    def give_obj(self, obj: Any) -> None:
        self._comm.send_obj(obj, self._peer, TAG)

    def take_obj(self) -> Any:
        return self._comm.recv_obj(self._peer, TAG)


class Broadcasts:
    """A way from the rank `source` to all others, which take the same number of times. What they take is valid until the next."""

    def __init__(self, comm: Communicator, source: int) -> None:
        self._comm, self.source = comm, source
        self._room = torch.empty(0, dtype=torch.uint8)

    def give(self, x: torch.Tensor) -> None:
        self._comm.bcast(x, self.source)

    def take(self, nbytes: int) -> torch.Tensor:
        if len(self._room) < nbytes:
            self._room = torch.empty(nbytes, dtype=torch.uint8)
        return self._comm.bcast(self._room[:nbytes], self.source)

    def give_obj(self, obj: Any) -> None:
        self._comm.bcast_obj(obj, self.source)

    def take_obj(self) -> Any:
        return self._comm.bcast_obj(None, self.source)


def hand_over(
    comm: Communicator, source: int, newcomers: Sequence[int], state: Callable[[], Mapping[str, Any]], member: int
) -> dict[str, Any] | None:
    """On each of the `newcomers`, the state of rank `source`; elsewhere None. All ranks call it. `member` is this process."""
    if comm.shares_memory:
        everybody = Broadcasts(comm, source)
        if comm.rank == source:
            send_state(everybody, state())
        elif comm.rank in newcomers:
            return receive_state(everybody, member)
        else:
            overhear_state(everybody)
    elif comm.rank == source:
        for rank in newcomers:
            send_state(Messages(comm, rank), state())
    elif comm.rank in newcomers:
        return receive_state(Messages(comm, source), member)
    return None


def send_state(way: Messages | Broadcasts, state: Mapping[str, Any]) -> None:
    """Send a state, and the digest from which a newcomer derives its own random numbers."""
    tensors = _Tensors()
    tree = _plain(dict(state), tensors, "the state")
    forms = [(str(x.dtype).removeprefix("torch."), tuple(x.shape)) for x in tensors.found]
    way.give_obj({"tree": tree, "tensors": forms, "bytes": sum(x.nbytes for x in tensors.found), "random": _seen_random()})
    checks = []
    for piece in _pieces(tensors.found):
        way.give(piece)
        checks.append(_checksum(piece))
    way.give_obj(checks)


def receive_state(way: Messages | Broadcasts, member: int) -> dict[str, Any]:
    """The state that is sent; seeds the random generators of this process with numbers of its own."""
    found = way.take_obj()
    tensors = [torch.empty(shape, dtype=getattr(torch, name)) for name, shape in found["tensors"]]
    checks: list[int] = []

    def pieces() -> Iterator[torch.Tensor]:
        for length in _lengths(found["bytes"]):
            piece = way.take(length)
            checks.append(_checksum(piece))
            yield piece

    _fill([_bytes_of(x) for x in tensors], pieces())
    for number, (mine, check) in enumerate(zip(checks, way.take_obj(), strict=True)):
        if mine != check:
            raise StateDamagedError(f"piece {number} of the state that rank {way.source} sent arrived with different bits")
    _seed(found["random"], member)
    restored: dict[str, Any] = _restored(found["tree"], tensors)
    return restored


def overhear_state(way: Broadcasts) -> None:
    """Take part in the broadcasts of a state that this rank has."""
    for length in _lengths(way.take_obj()["bytes"]):
        way.take(length)
    way.take_obj()


def _lengths(nbytes: int) -> list[int]:
    """Of the pieces of so many bytes."""
    return [min(PIECE, nbytes - at) for at in range(0, nbytes, PIECE)]


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor. Those of a contiguous one are the tensor's own, not a copy."""
    dense = torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x.detach().resolve_neg()
    return bytes_of(dense.contiguous())


def _pieces(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The bytes of all tensors, one after the other, in pieces. Each is valid until you ask for the next."""
    room, filled = torch.empty(min(PIECE, sum(x.nbytes for x in tensors)), dtype=torch.uint8), 0
    for x in tensors:
        part, done = _bytes_of(x).cpu(), 0
        while done < len(part):
            count = min(len(part) - done, PIECE - filled)
            room[filled : filled + count] = part[done : done + count]
            done, filled = done + count, filled + count
            if filled == PIECE:
                yield room
                filled = 0
    if filled:
        yield room[:filled]


def _fill(parts: Sequence[torch.Tensor], pieces: Iterator[torch.Tensor]) -> None:
    """The inverse: copy the bytes of the pieces into all parts."""
    piece = torch.empty(0, dtype=torch.uint8)
    for part in parts:
        done = 0
        while done < len(part):
            if not len(piece):
                piece = next(pieces)
            count = min(len(part) - done, len(piece))
            part[done : done + count] = piece[:count]
            done, piece = done + count, piece[count:]


def _checksum(piece: torch.Tensor) -> int:
    """Sees one or two flipped bits anywhere, and two words or rows that changed places.

    Words stand in rows of COLUMNS. It is a CRC of the sums of all columns and of all rows, and of the last bytes. A CRC of all
    bytes would take a tenth of the time that the others wait.
    """
    whole = len(piece) // (8 * COLUMNS) * (8 * COLUMNS)
    words = piece[:whole].view(torch.int64).view(-1, COLUMNS)
    found = zlib.crc32(piece[whole:].numpy().data)
    for sums in (words.sum(dim=0), words.sum(dim=1)):
        found = zlib.crc32(sums.numpy().data, found)
    return found


class _Tensors:
    """The tensors of a state. A parameter is in the model's state and in the optimizer's list, but is sent once."""

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []
        self._numbers: dict[tuple[Any, ...], int] = {}

    def number(self, x: torch.Tensor) -> int:
        new = len(self.found)
        place = (x.data_ptr(), x.shape, x.stride(), x.dtype, x.device) if x.numel() else (new,)
        number = self._numbers.setdefault(place, new)
        if number == new:
            self.found.append(x.detach())
        return number


def _plain(value: Any, tensors: _Tensors, where: str) -> Any:
    """`value` as plain data: each container and each tensor as a pair of its kind and its content."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str, bytes):
        return value
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise TypeError(f"{where} is a tensor of {value.layout}: a newcomer can only get dense tensors")
        return ("tensor", tensors.number(value))
    if kind in (dict, OrderedDict, Counter):
        pairs = [(_plain(key, tensors, where), _plain(item, tensors, f"{where}[{key!r}]")) for key, item in value.items()]
        return (kind.__name__, pairs)
    if kind in (list, tuple, torch.Size):
        return (kind.__name__, [_plain(item, tensors, f"{where}[{i}]") for i, item in enumerate(value)])
    if kind is torch.dtype:
        return ("dtype", str(value).removeprefix("torch."))
    raise TypeError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which cannot be sent to a newcomer: a state is made of None, bool, "
        "int, float, str, bytes, list, tuple, dict, dtypes and dense tensors"
    )


_KINDS: dict[str, Any] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": lambda pairs: Counter(dict(pairs))}
_LISTS: dict[str, Any] = {"list": list, "tuple": tuple, "Size": torch.Size}


def _restored(tree: Any, tensors: list[torch.Tensor]) -> Any:
    if not isinstance(tree, tuple):
        return tree
    kind, content = tree
    if kind == "tensor":
        return tensors[content]
    if kind == "dtype":
        return getattr(torch, content)
    if kind in _KINDS:
        return _KINDS[kind]((_restored(key, tensors), _restored(item, tensors)) for key, item in content)
    return _LISTS[kind]([_restored(item, tensors) for item in content])


# ---- random numbers ------------------------------------------------------------------------------------------------------------


def _seen_random() -> bytes:
    """A digest of the state of this process's random generators."""
    seen = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    seen.update(repr(random.getstate()).encode())
    return seen.digest()


def _seed(seen: bytes, member: int) -> None:
    """A stream of this member's own, derived from the sender's: two newcomers must not draw the same numbers."""
    seed = int.from_bytes(hashlib.sha256(seen + str(member).encode()).digest()[:4], "little")
    random.seed(seed)
    torch.manual_seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)
