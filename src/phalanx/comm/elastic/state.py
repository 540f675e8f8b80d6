"""Sends the state of a training run to a newcomer: plain data and tensors over our own verbs, verified. No pickle, no disk.

A state is what `state_dict()` returns: nested dicts, lists and tuples of plain values and tensors. The structure is sent first,
as plain data. Then the bytes of all tensors follow in pieces of 16 MiB, because most tensors are small, and a message for each
would take longer than the bytes. Both sides compute the checksum of a piece after it was sent, at the same time, and the receiver
compares them at the end.
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


def send_state(comm: Communicator, dest: int, state: Mapping[str, Any]) -> None:
    """Send a state, and the digest from which the newcomer derives its own random numbers."""
    tensors = _Tensors()
    tree = _plain(dict(state), tensors, "the state")
    forms = [(str(x.dtype).removeprefix("torch."), tuple(x.shape)) for x in tensors.found]
    comm.send_obj({"tree": tree, "tensors": forms, "random": _seen_random()}, dest, TAG)
    checks = []
    for piece in _pieces(tensors.found):
        comm.send(piece, dest, TAG)
        checks.append(_checksum(piece))
    comm.send_obj(checks, dest, TAG)


def receive_state(comm: Communicator, source: int, member: int) -> dict[str, Any]:
    """The state that `source` sends; seeds the random generators of this process with numbers of its own."""
    found = comm.recv_obj(source, TAG)
    tensors = [torch.empty(shape, dtype=getattr(torch, name)) for name, shape in found["tensors"]]
    checks: list[int] = []

    def next_piece() -> torch.Tensor:
        piece = comm.recv(source, TAG).cpu()
        checks.append(_checksum(piece))
        return piece

    _fill([_bytes_of(x) for x in tensors], next_piece)
    for number, (mine, check) in enumerate(zip(checks, comm.recv_obj(source, TAG), strict=True)):
        if mine != check:
            raise StateDamagedError(f"piece {number} of the state that rank {source} sent arrived with different bits")
    _seed(found["random"], member)
    restored: dict[str, Any] = _restored(found["tree"], tensors)
    return restored


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


def _fill(parts: Sequence[torch.Tensor], next_piece: Callable[[], torch.Tensor]) -> None:
    """The inverse: copy the bytes of the pieces into all parts."""
    piece = torch.empty(0, dtype=torch.uint8)
    for part in parts:
        done = 0
        while done < len(part):
            if not len(piece):
                piece = next_piece()
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
