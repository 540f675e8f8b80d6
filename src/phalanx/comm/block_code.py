"""An 8-bit code for blocks of float32, each with one scale. It is what `Recode` in a schedule means for tensors.

A block whose largest magnitude is m is sent as integers from -127 to 127 and the scale m / 127, in float32. The error of each
number is at most half a scale, m / 254, or less than a whole one with stochastic rounding. A block with NaN or inf gets the scale
NaN and is decoded as NaN, so it is never clipped. A block whose magnitudes are all below 2**-100 is sent as zeros.

With error feedback a rank adds what it rounded away to the next numbers that it encodes at the same place. The native core does
all of this in one pass. Without the core, torch computes the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from phalanx.native import codes

LEAST, MOST = 16, 1 << 16  # numbers in a block; the least is a multiple of the core's vectors


@dataclass(frozen=True, slots=True)
class BlockCode:
    """Blocks of `block` numbers. Each is rounded to the nearest code, or stochastically up or down in proportion."""

    block: int = 256
    stochastic: bool = False

    def __post_init__(self) -> None:
        if type(self.block) is not int or self.block % LEAST or not LEAST <= self.block <= MOST:
            raise ValueError(f"block={self.block!r}: numbers that share a scale, a multiple of {LEAST} from {LEAST} to {MOST}")

    @property
    def ratio(self) -> Fraction:
        """The size of the code as a fraction of the float32 that it encodes."""
        return Fraction(self.block + 4, 4 * self.block)

    def nbytes(self, count: int) -> int:
        """Return the bytes that `count` numbers take: the scales, then the codes, padded to whole words."""
        return 4 * -(-count // self.block) + -(-count // 4) * 4


class Coder:
    """Encodes and decodes parts of one buffer. `error`, of the same length, holds what was rounded away before.

    `key` and the place of a number seed its stochastic rounding, so the same call gives the same bits again. `decode` multiplies
    by `factor`; `add` does not.
    """

    def __init__(self, code: BlockCode, error: torch.Tensor | None = None, *, key: int = 0, factor: float = 1.0) -> None:
        self.code, self._error, self._key, self._factor = code, error, key & 0xFFFFFFFF, factor

    def encode(self, x: torch.Tensor, out: torch.Tensor, at: int) -> None:
        """Write the code of `x`, which begins at element `at` of the buffer, to the bytes `out`. Keep the rounding error."""
        error = None if self._error is None else self._error[at : at + x.numel()]
        if error is not None and error.numel() != x.numel():
            raise ValueError(f"the errors end at {at + error.numel()}, but what is encoded ends at {at + x.numel()}")
        codes.encode(x, error, out, self.code.block, self._key if self.code.stochastic else None, at)

    def add(self, encoded: Sequence[torch.Tensor], x: torch.Tensor) -> None:
        """Decode the codes one after the other and add each to `x`."""
        codes.add(encoded, x, self.code.block)

    def decode(self, encoded: torch.Tensor, x: torch.Tensor) -> None:
        """Decode, multiply by `factor` and write to `x`."""
        codes.decode(encoded, x, self.code.block, self._factor)
