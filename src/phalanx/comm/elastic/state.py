"""The state of a training run on its way to a newcomer: plain data and tensors over our own verbs, verified. No pickle, no disk.

A state is what `state_dict()` returns: nested dicts, lists and tuples of plain values and tensors. The structure travels first,
as plain data, then the tensors one after the other, then a checksum of each, which the receiver compares. Both sides compute the
checksum of a tensor after it has travelled, at the same time.
"""

from __future__ import annotations

import hashlib
import random
import sys
import zlib
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from phalanx.comm.communicator import Communicator
from phalanx.comm.envelope import bytes_of
from phalanx.comm.failure import CommunicationError

TAG = 0x5747  # of the messages that carry a state


class StateDamagedError(CommunicationError):
    """What arrived is not what was sent."""


def send_state(comm: Communicator, dest: int, state: Mapping[str, Any]) -> None:
    """Send a state, and from which random numbers the newcomer shall derive its own."""
    tensors = _Tensors()
    tree = _plain(dict(state), tensors, "the state")
    comm.send_obj({"tree": tree, "count": len(tensors.found), "random": _seen_random()}, dest, TAG)
    checks = []
    for x in tensors.found:
        comm.send(x, dest, TAG)
        checks.append(checksum(x))
    comm.send_obj(checks, dest, TAG)


def receive_state(comm: Communicator, source: int, member: int) -> dict[str, Any]:
    """The state that `source` sends; seeds the random generators of this process with numbers of its own."""
    found = comm.recv_obj(source, TAG)
    tensors, checks = [], []
    for _ in range(found["count"]):
        tensors.append(comm.recv(source, TAG))
        checks.append(checksum(tensors[-1]))
    for number, (mine, check) in enumerate(zip(checks, comm.recv_obj(source, TAG), strict=True)):
        if mine != check:
            raise StateDamagedError(f"tensor {number} of the state that rank {source} sent arrived with other bits")
    _seed(found["random"], member)
    restored: dict[str, Any] = _restored(found["tree"], tensors)
    return restored


def checksum(x: torch.Tensor) -> int:
    """A number that differs for different bits."""
    dense = torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x.detach()
    return zlib.crc32(bytes_of(dense.contiguous()).cpu().numpy().data)


class _Tensors:
    """The tensors of a state. A parameter is in the model's state and in the optimizer's list: it travels once."""

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
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which cannot travel to a newcomer: a state is made of None, bool, "
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
    """What the generators of this process will do next, as a digest."""
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
