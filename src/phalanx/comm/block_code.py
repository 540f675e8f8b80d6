"""Numbers as 8 bits: blocks of float32, each with one scale. What `Recode` of a schedule means on tensors.

A block of numbers whose largest magnitude is m travels as whole numbers from -127 to 127 and the scale m / 127, in float32. So
a number is off by at most half a scale, m / 254, and with stochastic rounding by less than a whole one. A block with NaN or inf
has the scale NaN, and comes back as NaN: what is not finite is never clipped. A block whose magnitudes are all below 2**-100
travels as zeros.

With error feedback a rank adds what it rounded away to the next numbers that it encodes at the same place. The native core does
all of it in one pass; without one torch does, with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from phalanx.native import codes

LEAST, MOST = 16, 1 << 16  # numbers in a block; the core's vectors divide the least


@dataclass(frozen=True, slots=True)
class BlockCode:
    """Blocks of `block` numbers, rounded to the nearest code or at random, up or down in proportion."""

    block: int = 256
    stochastic: bool = False

    def __post_init__(self) -> None:
        if type(self.block) is not int or self.block % LEAST or not LEAST <= self.block <= MOST:
            raise ValueError(f"block={self.block!r}: numbers that share a scale, a multiple of {LEAST} from {LEAST} to {MOST}")

    @property
    def ratio(self) -> Fraction:
        """The size of encoded float32, as a share of their own."""
        return Fraction(self.block + 4, 4 * self.block)

    def nbytes(self, count: int) -> int:
        """Bytes of `count` encoded numbers: the scales, then the codes, padded to whole words."""
        return 4 * -(-count // self.block) + -(-count // 4) * 4


class Coder:
    """Encodes and decodes the parts of one buffer; `error` is what was rounded away before, a buffer of the same length.

    `key` seeds stochastic rounding together with the place of a number, so the same call gives the same bits again. What is
    decoded is multiplied by `factor`, what is added is not.
    """

    def __init__(self, code: BlockCode, error: torch.Tensor | None = None, *, key: int = 0, factor: float = 1.0) -> None:
        self.code, self._error, self._key, self._factor = code, error, key & 0xFFFFFFFF, factor

    def encode(self, x: torch.Tensor, out: torch.Tensor, at: int) -> None:
        """Write the code of `x`, which begins at element `at` of the buffer, to the bytes `out`; note what was rounded away."""
        error = None if self._error is None else self._error[at : at + x.numel()]
        codes.encode(x, error, out, self.code.block, self._key if self.code.stochastic else None, at)

    def add(self, encoded: Sequence[torch.Tensor], x: torch.Tensor) -> None:
        """Add what the codes stand for to `x`, one after the other."""
        codes.add(encoded, x, self.code.block)

    def decode(self, encoded: torch.Tensor, x: torch.Tensor) -> None:
        """Write `factor` times what the code stands for to `x`."""
        codes.decode(encoded, x, self.code.block, self._factor)
