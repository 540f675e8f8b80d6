"""8-bit block codes of float32: by the native core if it can, otherwise by torch, with the same bits.

A code of n numbers is one float32 scale per block, then n signed bytes. `comm/block_code.py` says what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.native import core

LARGEST = 127.0
TINY = 2.0**-100  # blocks of smaller numbers are sent as zeros: the inverse of their scale would overflow
WORD = 0xFFFFFFFF


def encode(x: torch.Tensor, error: torch.Tensor | None, out: torch.Tensor, block: int, key: int | None, at: int) -> None:
    """Write the code of `x` plus `error` to `out`, and the rounding error to `error`, which may be None.

    With a `key`, rounding is stochastic. It depends on the key and on each number's position; `at` is that of the first.
    """
    if x.numel() == 0:
        return
    if _in_core(x, out) and (error is None or error.is_contiguous()):
        to = 0 if error is None else error.data_ptr()
        core._native.encode_blocks(x.data_ptr(), to, out.data_ptr(), x.numel(), block, int(key is not None), key or 0, at & WORD)
    else:
        _encode(x, error, out, block, key, at)


def add(encoded: Sequence[torch.Tensor], x: torch.Tensor, block: int) -> None:
    """Decode each code and add it to `x`, in order."""
    if x.numel() and _in_core(x, *encoded):
        sources = torch.tensor([code.data_ptr() for code in encoded], dtype=torch.int64)
        core._native.add_blocks(sources.data_ptr(), len(encoded), x.data_ptr(), x.numel(), block)
    elif x.numel():
        for code in encoded:
            x.add_(_numbers(code, x.numel(), block, 1.0))


def decode(encoded: torch.Tensor, x: torch.Tensor, block: int, factor: float) -> None:
    """Decode, multiply by `factor`, and write to `x`."""
    if x.numel() and _in_core(x, encoded):
        core._native.decode_blocks(encoded.data_ptr(), x.data_ptr(), x.numel(), block, factor)
    elif x.numel():
        x.copy_(_numbers(encoded, x.numel(), block, factor))


def _in_core(x: torch.Tensor, *codes: torch.Tensor) -> bool:
    return core.is_native() and x.is_cpu and x.is_contiguous() and all(code.is_contiguous() for code in codes)


def _parts(encoded: torch.Tensor, count: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales and the codes of `count` numbers."""
    scales = 4 * -(-count // block)
    return encoded[:scales].view(torch.float32), encoded[scales : scales + count].view(torch.int8)


def _encode(x: torch.Tensor, error: torch.Tensor | None, out: torch.Tensor, block: int, key: int | None, at: int) -> None:
    count = x.numel()
    scales, bytes_ = _parts(out, count, block)
    blocks = x.new_zeros(scales.numel(), block)
    wanted = blocks.view(-1)[:count]
    if error is None:
        wanted.copy_(x)
    else:
        torch.add(x, error, out=wanted)
    largest = blocks.abs().amax(1)
    bad = ~torch.isfinite(largest)
    live = (largest >= TINY) & ~bad
    scale = torch.where(live, largest / LARGEST, torch.zeros_like(largest))
    inverse = torch.where(live, LARGEST / largest, torch.zeros_like(largest))
    steps = torch.where(bad[:, None], torch.zeros_like(blocks), blocks * inverse[:, None])
    if key is None:
        rounded = steps.round()
    else:
        chance = _uniform(key, at, count, x.device)
        steps.view(-1)[:count].add_(chance)
        rounded = steps.floor().clamp(-LARGEST, LARGEST)
    if error is not None:
        rest = blocks - rounded * scale[:, None]
        known = bad.repeat_interleave(block)[:count]  # non-finite blocks are not sent, so their error is kept
        error.copy_(torch.where(known, error, rest.view(-1)[:count]))
    scales.copy_(torch.where(bad, torch.full_like(scale, float("nan")), scale))
    bytes_.copy_(rounded.view(-1)[:count])


def _numbers(encoded: torch.Tensor, count: int, block: int, factor: float) -> torch.Tensor:
    scales, bytes_ = _parts(encoded, count, block)
    each = (scales * torch.tensor(factor, dtype=torch.float32)).repeat_interleave(block)[:count]
    return bytes_.to(torch.float32) * each


def _uniform(key: int, at: int, count: int, device: torch.device) -> torch.Tensor:
    """Numbers from [0, 1), in steps of 2**-24: a hash of the position and the key (Wellons, hash-prospector's lowbias32)."""
    h = (torch.arange(at, at + count, dtype=torch.int64, device=device) * 0x9E3779B9 + key) & WORD
    h = ((h ^ (h >> 16)) * 0x21F0AAAD) & WORD
    h = ((h ^ (h >> 15)) * 0xD35A2D97) & WORD
    h = h ^ (h >> 15)
    return (h >> 8).to(torch.float32) * 2.0**-24
