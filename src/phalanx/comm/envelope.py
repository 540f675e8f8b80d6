"""The header that announces a tensor of unknown shape, and plain objects as tensors of bytes."""

from __future__ import annotations

from typing import Any

import torch

from phalanx.comm import codec

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip  # their order is the wire's numbering
MOST_DIMS = 64  # the limit of torch's own operations; a view may have more
HEADER = 72  # int64s: dtype, device, dimensions, shape


def header_of(x: torch.Tensor) -> torch.Tensor:
    """Return the header that announces `x`."""
    words = [DTYPES.index(x.dtype), int(x.is_cuda), x.dim(), *x.shape]
    return torch.tensor(words + [0] * (HEADER - len(words)), dtype=torch.int64)


def announced(header: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """Allocate the tensor that `header` announces. A CUDA tensor is placed on `device`, or on the current one."""
    dtype, cuda, dims, *shape = header.tolist()
    return torch.empty(shape[:dims], dtype=DTYPES[dtype], device=(device or "cuda") if cuda else "cpu")


def describes(header: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether `x` has the dtype and shape that `header` announces."""
    dtype, _, dims, *shape = header.tolist()
    return DTYPES[dtype] == x.dtype and tuple(shape[:dims]) == tuple(x.shape)


def is_plain(x: torch.Tensor) -> bool:
    """Whether the bytes in memory are the value, in order, with no conjugation or negation that torch has deferred."""
    return x.is_contiguous() and not x.is_conj() and not x.is_neg()


def plain(x: torch.Tensor) -> torch.Tensor:
    """Return `x`, or a copy of it whose bytes are the value."""
    return x.resolve_conj().resolve_neg().contiguous()


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    """View the memory of a contiguous tensor as bytes. Torch's own view refuses a single element with an odd stride."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def pack(obj: Any) -> torch.Tensor:
    """Encode plain data as a tensor of bytes."""
    return torch.frombuffer(codec.encode(obj), dtype=torch.uint8)


def unpack(x: torch.Tensor) -> Any:
    """Decode what `pack` encoded."""
    return codec.decode(x.numpy().data)
