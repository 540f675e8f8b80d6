"""Data with exact answers: integers that repeat with a prime period, small enough that their sums are exact.

Every rank knows the data of every other rank, so it can compute every answer without communication.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

PERIOD = 251  # a prime: no chunk boundary falls on it, so swapped chunks give a wrong answer
GUARD = 1  # fills the gaps of a strided tensor, and must stay unchanged

# Most important first: if time is short, the others are skipped.
DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.float64, torch.int32, torch.uint8, torch.bool, torch.int8,
    torch.int16,
)  # fmt: skip
SMALL, LARGE = (1, 17), (1 << 20) + 3  # elements; LARGE is odd, and larger than any algorithm's pieces
LARGEST = {torch.bfloat16: 1 << 8, torch.float16: 1 << 11, torch.float32: 1 << 24, torch.float64: 1 << 53}  # exact up to here

Layout = Literal["contiguous", "strided", "side stream"]


def layouts(device: torch.device) -> list[Layout]:
    """The layouts and streams to test on this device."""
    return ["contiguous", "strided", "side stream"] if device.type == "cuda" else ["contiguous", "strided"]


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of tensor, in a world of `world` ranks."""

    world: int
    dtype: torch.dtype
    numel: int
    layout: Layout
    device: torch.device

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{self.numel}] {self.layout} on {self.device.type}"

    def tensor(self, sender: int, more: int = 0) -> torch.Tensor:
        """The tensor of `sender` in the case's layout, `more` elements longer than usual."""
        return self.lay_out(self.dense(sender, more))

    def dense(self, sender: int, more: int = 0) -> torch.Tensor:
        """The contiguous tensor, which is the answer of verbs that move tensors."""
        return self._repeated(numbers(sender, self.world, self.dtype), self.numel + more)

    def reduced(self, op: str, more: int = 0) -> torch.Tensor:
        """The answer of a reduction over all ranks."""
        return self._repeated(reduced_numbers(op, self.world, self.dtype), self.numel + more)

    def lay_out(self, dense: torch.Tensor) -> torch.Tensor:
        """A copy of `dense` in this layout."""
        if self.layout != "strided":
            return dense.clone()
        room = torch.full((2 * dense.numel(),), GUARD, dtype=self.dtype, device=self.device)
        room[::2] = dense
        return room[::2]

    def tolerance(self, op: str) -> float:
        """The allowed error relative to the largest answer: zero, except for a mean over ranks that are not a power of two."""
        if op != "mean" or self.world & (self.world - 1) == 0:
            return 0.0
        return torch.finfo(self.dtype).eps * (self.world + 2)

    def ops(self) -> Sequence[Literal["sum", "mean", "max", "min"]]:
        """The reductions that this dtype supports."""
        return ("sum", "mean", "max", "min") if self.dtype.is_floating_point else ("sum", "max", "min")

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Inside, work runs on the stream that the layout names."""
        if self.layout != "side stream":
            yield
            return
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            yield
        torch.cuda.current_stream(self.device).wait_stream(side)

    def _repeated(self, period: torch.Tensor, numel: int) -> torch.Tensor:
        return period.to(self.device).repeat(-(-numel // PERIOD))[:numel]


@functools.lru_cache(maxsize=4096)
def numbers(sender: int, world: int, dtype: torch.dtype) -> torch.Tensor:
    """One period of `sender`'s data: the same numbers in a different order on every rank."""
    at = torch.arange(1, PERIOD + 1)
    found = (sender + 1) * at**2 % PERIOD
    if dtype is torch.bool:  # rarely true, so that the `or` over many ranks is not always true
        return found % (2 * world) == 0
    if dtype.is_floating_point:
        limit = min(LARGEST[dtype], 1 << 24)
        adding = min(world, limit // 2)  # ranks; if there are more, only some have nonzero numbers
        if sender % -(-world // adding):
            return torch.zeros(PERIOD, dtype=dtype)
        found = found % min(PERIOD, limit // adding)
    return found.to(dtype)


@functools.lru_cache(maxsize=256)
def reduced_numbers(op: str, world: int, dtype: torch.dtype) -> torch.Tensor:
    """One period of the answer, computed with 64 bits. Integers wrap around, as everywhere."""
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    table = torch.stack([numbers(sender, world, dtype).to(wide) for sender in range(world)])
    if op in ("max", "min"):
        return (table.amax(0) if op == "max" else table.amin(0)).to(dtype)
    if dtype is torch.bool:  # the sum of booleans is their `or`
        return table.amax(0).to(dtype)
    total = table.sum(0)
    return (total / world if op == "mean" else total).to(dtype)


def difference(got: object, want: torch.Tensor, tolerance: float = 0.0) -> str:
    """How `got` differs from the answer; empty if it does not."""
    if not isinstance(got, torch.Tensor):
        return f"a {type(got).__name__} instead of a tensor"
    for what in ("dtype", "device", "shape"):
        mine, wanted = getattr(got, what), getattr(want, what)
        if mine != wanted:
            return f"{what} {_plain(mine)} instead of {_plain(wanted)}"
    off = (got.double() - want.double()).abs() > tolerance * want.double().abs().clamp(min=1) if tolerance else got != want
    wrong = int(off.sum())
    if not wrong:
        return ""
    first = int(off.view(-1).nonzero()[0])
    return f"element {first} is {got.reshape(-1)[first].item()} instead of {want.view(-1)[first].item()}, {wrong} are wrong"


def _plain(value: object) -> object:
    return list(value) if isinstance(value, torch.Size) else value


def guard_is_lost(x: torch.Tensor) -> bool:
    """Whether a strided tensor's neighbours in memory were written to."""
    if x.dim() != 1 or x.numel() < 2 or x.stride(0) != 2:
        return False
    between = torch.as_strided(x, (x.numel() - 1,), (2,), x.storage_offset() + 1)
    return bool((between != GUARD).any())
