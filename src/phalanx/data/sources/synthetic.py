"""Random images of any shape, for benchmarks: sample i is the same on every rank and in every run, and costs one copy.

The pixels of a sample are a window, at an offset drawn from its number, of one block of random bytes: drawing 150 KB for each
image would cost more than many of the models to be measured. Samples are distinct if there are fewer than WINDOWS.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any, SupportsIndex

import numpy as np
import torch
from torch import Tensor

from phalanx.data.source import SourceError, as_rows, at
from phalanx.data.splitmix import GOLDEN, MASK, mix

WINDOWS = 1 << 20
MAX_ELEMENTS = 1 << 28  # of one sample: a typo must not fill the memory
MAX_SAMPLES = 1 << 40
MAX_CLASSES = 1 << 20
LABELS, PLACES = 1, 2  # purposes of random numbers


@dataclass(frozen=True)
class Synthetic:
    """`n` random samples of uint8 with labels below `classes`, made on demand."""

    shape: tuple[int, ...]
    n: int = 100_000
    class_count: int = 1000
    seed: int = 0
    _block: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        bytes_ = np.random.RandomState(self.seed % (1 << 32)).bytes(WINDOWS + math.prod(self.shape))  # a frozen generator
        object.__setattr__(self, "_block", torch.frombuffer(bytearray(bytes_), dtype=torch.uint8))

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(map(str, range(self.class_count)))

    @property
    def name(self) -> str:
        return f"synthetic:{'x'.join(map(str, self.shape))}"

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: SupportsIndex) -> tuple[Tensor, int]:
        x, y = self.take(np.array([at(i, self.n)]))
        return x[0], int(y[0])

    def take(self, indices: np.ndarray | Tensor) -> tuple[Tensor, Tensor]:
        """The samples with these numbers."""
        rows = as_rows(indices)
        if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < self.n):
            raise IndexError(f"samples {int(rows.min())} to {int(rows.max())} of {self.n}")
        numbers = rows.numpy().view(np.uint64)
        y = torch.from_numpy((_mixed(numbers, self.seed, LABELS) % np.uint64(self.class_count)).astype(np.int64))
        # an odd factor such as GOLDEN permutes the windows, so neighbours lie far apart and no two of WINDOWS samples are equal
        starts = (numbers * np.uint64(GOLDEN) + _mixed(np.uint64(0), self.seed, PLACES)) % np.uint64(WINDOWS)
        windows = self._block.as_strided((WINDOWS, math.prod(self.shape)), (1, 1))
        return windows.index_select(0, torch.from_numpy(starts.astype(np.int64))).view(-1, *self.shape), y

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the parameters, not the block."""
        return Synthetic, (self.shape, self.n, self.class_count, self.seed)


def _mixed(numbers: Any, seed: int, purpose: int) -> Any:
    """64 bits for each of `numbers`: splitmix64 of number, seed and purpose."""
    with np.errstate(over="ignore"):  # wrapping modulo 2**64 is intended
        return mix(numbers + np.uint64((seed * 4 + purpose) * GOLDEN & MASK))


def load(text: str, split: str) -> Synthetic:
    """`3x224x224,classes=1000,n=100000,seed=0`; held-out data use another seed."""
    shape_text, *options = text.split(",")
    numbers = {"classes": 1000, "n": 100_000, "seed": 0}
    for option in options:
        found = re.fullmatch(r"(\w+)=(\d{1,18})", option, re.ASCII)
        if not found or found[1] not in numbers:
            raise SourceError(f"synthetic:{text}: {option!r} is none of classes=N, n=N, seed=N")
        numbers[found[1]] = int(found[2])
    if not re.fullmatch(r"\d{1,9}(x\d{1,9}){0,7}", shape_text, re.ASCII):
        raise SourceError(f"synthetic:{text}: {shape_text!r} is not a shape such as 3x224x224")
    shape = tuple(map(int, shape_text.split("x")))
    for what, number, most in (
        ("elements of a sample", math.prod(shape), MAX_ELEMENTS),
        ("n", numbers["n"], MAX_SAMPLES),
        ("classes", numbers["classes"], MAX_CLASSES),
    ):
        if not 1 <= number <= most:
            raise SourceError(f"synthetic:{text}: {what}: {number}, wanted 1 to {most}")
    return Synthetic(shape, numbers["n"], numbers["classes"], 2 * numbers["seed"] + (split != "train"))
