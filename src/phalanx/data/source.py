"""Sources: labelled samples by number. `open("cifar10:DIR")` opens one by its spec.

There are two kinds. **Arrays** (and anything else with `take`) hold decoded samples and return many of them in one indexing
operation. **Encoded** sources return the bytes of one file at a time, for a decoder. Both have a length, `classes` and
`source[i]`; both can be used by several threads at once and pickled to worker processes.

    Arrays      digits, mnist, fashion-mnist, cifar10, cifar100; synthetic data have the same interface
    Encoded     imagefolder, shards
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, SupportsIndex, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from phalanx.schedule.printable import one_line

HELD_OUT = ("val", "validation", "test")
SPLITS = ("train", *HELD_OUT)
MAX_EXAMPLES = 20  # skipped samples that are remembered by name; the count is always exact


class SourceError(ValueError):
    """A source cannot be opened, or does not match its spec. The message names the cause and the remedy.

    Example:
        >>> phalanx.data.open("digits:DIR")
        Traceback (most recent call last):
        phalanx.data.source.SourceError: 'digits:DIR' does not have the form digits
    """


@runtime_checkable
class Takes(Protocol):
    """A source of decoded samples. `take` returns many at once, as (x, y) with a leading dimension."""

    @property
    def classes(self) -> tuple[str, ...]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, i: SupportsIndex) -> tuple[Tensor, Any]: ...

    def take(self, indices: np.ndarray | Tensor) -> tuple[Tensor, Tensor]: ...


@runtime_checkable
class Encoded(Protocol):
    """The interface of a source of files: it returns the bytes of one sample at a time, for a decoder.

    Your own class needs these methods; it need not inherit from this one. Several threads may call it at once.

    Example:
        >>> isinstance(phalanx.data.open("digits"), phalanx.data.Encoded)  # digits are decoded already
        False
    """

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the labels."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, i: SupportsIndex) -> tuple[bytes, int]: ...

    def read(self, i: SupportsIndex) -> bytes:
        """The bytes of sample `i`."""
        ...

    def label(self, i: SupportsIndex) -> int:
        """The class of sample `i`."""
        ...

    def name(self, i: SupportsIndex) -> str:
        """The name of sample `i` for error messages."""
        ...


@dataclass(frozen=True, eq=False)
class Arrays:
    """A data set in memory.

    Args:
        x: Samples along the first dimension. Images are uint8, N x C x H x W.
        y: Labels, int64.
        classes: The names of the classes. Empty if you don't know them.
        name: The name of the data set in error messages.

    Raises:
        SourceError: If `x` and `y` do not fit, or a label has no class.

    Example:
        >>> data = phalanx.data.Arrays(torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 0, 1]), ("cat", "dog"))
        >>> len(data), data[3][1]
        (4, 1)
    """

    x: Tensor
    y: Tensor
    classes: tuple[str, ...] = ()
    name: str = ""

    def __post_init__(self) -> None:
        if self.x.dim() < 1 or self.y.shape != self.x.shape[:1]:
            raise SourceError(f"{self.name or 'Arrays'}: x is {tuple(self.x.shape)} and y {tuple(self.y.shape)}: one label each")
        if self.y.dtype != torch.int64:
            raise SourceError(f"{self.name or 'Arrays'}: labels are {self.y.dtype}, wanted int64: y.long()")
        if self.classes and len(self.y):
            low, high = int(self.y.min()), int(self.y.max())
            if low < 0 or high >= len(self.classes):
                raise SourceError(
                    f"{self.name or 'Arrays'}: labels run from {low} to {high}, but there are {len(self.classes)} classes"
                )

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: SupportsIndex) -> tuple[Tensor, int]:
        k = at(i, len(self))
        return self.x[k], int(self.y[k])

    def take(self, indices: np.ndarray | Tensor) -> tuple[Tensor, Tensor]:
        """Copies of the samples with these numbers, as (x, y)."""
        rows = as_rows(indices)
        return self.x.index_select(0, rows), self.y.index_select(0, rows)


@dataclass(frozen=True)
class Skipped:
    """The samples that a source skipped when it was indexed: how many, and the first few as (name, reason)."""

    count: int = 0
    examples: tuple[tuple[str, str], ...] = ()

    def plus(self, name: str, reason: str) -> Skipped:
        examples = self.examples if len(self.examples) >= MAX_EXAMPLES else (*self.examples, (name, reason))
        return Skipped(self.count + 1, examples)

    def joined(self, other: Skipped) -> Skipped:
        return Skipped(self.count + other.count, (self.examples + other.examples)[:MAX_EXAMPLES])

    def warn(self, source: str) -> None:
        """Warn once, with names: a source that shrinks silently costs accuracy."""
        if self.count:
            named = "; ".join(f"{name}: {reason}" for name, reason in self.examples[:5])
            more = f"; and {self.count - 5} more (`skipped` has the first {MAX_EXAMPLES})" if self.count > 5 else ""
            warnings.warn(one_line(f"{source}: left out {self.count}: {named}{more}"), stacklevel=4)


def at(i: SupportsIndex, n: int) -> int:
    """The index `i` of n samples; negative ones count from the end, as in Python sequences."""
    k = operator.index(i)
    if not -n <= k < n:
        raise IndexError(f"sample {k} of {n}")
    return k % n


def as_rows(indices: np.ndarray | Tensor) -> Tensor:
    """Sample numbers as a tensor. A boolean mask is rejected: torch would read it as zeros and ones."""
    rows = torch.from_numpy(np.ascontiguousarray(indices)) if isinstance(indices, np.ndarray) else torch.as_tensor(indices)
    if rows.dtype == torch.bool or rows.is_floating_point() or rows.dim() != 1:
        raise TypeError(f"take() needs a vector of whole numbers, not {rows.dtype} of shape {tuple(rows.shape)}")
    return rows.long()


@dataclass(frozen=True)
class Spec:
    """One row of the table of specs: its form, and the function that opens it."""

    form: str
    make: Callable[[str, str], Takes | Encoded]  # (what follows the colon, split) -> source


def open(spec: str, split: str = "train") -> Takes | Encoded:  # noqa: A001  reads as phalanx.data.open
    """Open a data set by its spec.

    Args:
        spec: `digits`, `mnist:DIR`, `fashion-mnist:DIR`, `cifar10:DIR`, `cifar100:DIR`, `imagefolder:DIR`, `shards:PATTERN` or
            `synthetic:...`. The page on sources describes each.
        split: `"train"`; or `"val"`, `"validation"` or `"test"` for the held-out part. Data sets with one held-out set give it
            under any of the three names.

    Returns:
        A source: `Arrays`, something else with `take`, or an `Encoded` source of files.

    Raises:
        SourceError: If there is no such source or split, or the files are not what the spec says.

    Example:
        >>> digits = phalanx.data.open("digits")
        >>> digits[0][0].shape, len(digits.classes)
        (torch.Size([1, 8, 8]), 10)
    """
    from phalanx.data.sources import SPECS  # here, because the sources import the types above

    name, _, rest = spec.partition(":")
    if name not in SPECS:
        raise SourceError(f"no source is called {name!r}; there are " + ", ".join(row.form for row in SPECS.values()))
    if split not in SPLITS:
        raise SourceError(f"no split is called {split!r}; there are " + ", ".join(SPLITS))
    form = SPECS[name].form
    if bool(rest) != (":" in form):
        raise SourceError(f"{spec!r} does not have the form {form}")
    return SPECS[name].make(rest, split)
