"""`device="cuda"` and pinned memory in torch's Python functions; torch's C++ side has neither here.

`replacements()` lists (owner, name, function). Tensors on a device have methods of their own (tensor.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tests.simulated_cuda import copies
from tests.simulated_cuda.device import Device
from tests.simulated_cuda.kernels import draw
from tests.simulated_cuda.simulation import current_stream, device_for
from tests.simulated_cuda.tensor import CudaTensor, moved, new, touch

FACTORIES = (
    "empty", "empty_strided", "zeros", "ones", "full", "arange", "linspace", "eye", "tensor", "as_tensor", "asarray",
    "rand", "randn", "randint", "randperm", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like",
)  # fmt: skip
METHODS = ("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "new_tensor")
UNINITIALIZED = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
FROM_HOST_VALUES = {"tensor", "as_tensor", "asarray", "new_tensor"}
RANDOM = {"rand", "randn", "randint", "randperm", "rand_like", "randn_like"}


def replacements() -> Iterator[tuple[Any, str, Any]]:
    """What `simulated` puts in place."""
    for name in FACTORIES:
        yield torch, name, _factory(name, getattr(torch, name))
    for name in METHODS:
        yield torch.Tensor, name, _factory(name, getattr(torch.Tensor, name))
    to = torch.Tensor.to

    def move(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return moved(x, to, args, kwargs)

    yield torch.Tensor, "to", move
    yield (
        torch.Tensor,
        "cuda",
        lambda x, device=None, non_blocking=False: move(x, "cuda" if device is None else device, non_blocking=non_blocking),
    )
    yield torch.Tensor, "pin_memory", lambda x, *args: copies.pin(x)
    yield torch.Tensor, "is_pinned", lambda x, *args: copies.is_pinned(x)


def _factory(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is None and not kwargs.get("pin_memory"):
            return make(*args, **kwargs)
        wanted, pinned = kwargs.pop("device", None), kwargs.pop("pin_memory", False)
        device = device_for(wanted)
        source = args[0] if args and isinstance(args[0], CudaTensor) else None
        if device is not None:
            if source is not None and source.block.stream.device is device and name != "new_tensor":
                return make(*args, **kwargs)
            if source is not None:
                args = (source.raw, *args[1:])
            return _by_kernel(name, make, device, args, kwargs)
        if wanted is not None:
            kwargs["device"] = wanted
            if source is not None:
                args = (source.cpu() if name in FROM_HOST_VALUES else source.raw, *args[1:])
        x = make(*args, **kwargs)
        return copies.pin(x) if pinned and not isinstance(x, CudaTensor) else x

    return made


def _by_kernel(name: str, make: Callable[..., Any], device: Device, args: Any, kwargs: Any) -> Any:
    requires_grad = kwargs.pop("requires_grad", False)
    if name in RANDOM:
        kwargs.setdefault("generator", torch.Generator().manual_seed(draw(device)))
    with torch.no_grad():
        values = make(*args, **kwargs)
        if name in FROM_HOST_VALUES:  # the host waits for such a copy
            return copies.to_device(values, device).requires_grad_(requires_grad)
        stream = current_stream(device)
        x = new(device, stream, values.shape, values.stride(), values.dtype)
        if name not in UNINITIALIZED:
            raw = x.raw
            stream.launch(name, lambda: raw.copy_(values), [touch(x, raw, writes=True)])
    return x.requires_grad_(requires_grad)
