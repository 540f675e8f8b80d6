"""A tensor in simulated device memory. Its shape is known at once, its values are not: its operations become kernels.

To torch's C++ side it is a CPU tensor with real memory, so autograd, hooks, views and `data_ptr()` are torch's own. Python sees
`is_cuda` and `cuda:N`.
"""

from __future__ import annotations

from typing import Any

import torch
from tests.simulated_cuda.device import Device, Stream, Touch
from tests.simulated_cuda.memory import Block
from tests.simulated_cuda.simulation import device_for

_DATA, _TO = torch.Tensor.data, torch.Tensor.to


class CudaTensor(torch.Tensor):
    """`raw` is a plain alias of its memory, for kernels; `block` keeps the memory."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    raw: torch.Tensor
    block: Block

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.block.stream.device.index)

    def get_device(self) -> int:
        return self.block.stream.device.index

    def record_stream(self, stream: Any) -> None:
        self.block.recorded[stream.queue] = None

    @property
    def data(self) -> Any:  # type: ignore[override]
        return _DATA.__get__(self)

    @data.setter
    def data(self, y: Any) -> None:
        _DATA.__set__(self, y)
        self.raw, self.block = y.raw, y.block  # the memory of `y` lives as long as this tensor

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return moved(self, _TO, args, kwargs)

    def cpu(self, memory_format: Any = None) -> Any:
        return self.to("cpu")

    def pin_memory(self, *args: Any) -> Any:
        raise RuntimeError(f"cannot pin a tensor on {self.device}, only dense CPU tensors can be pinned")

    def tolist(self) -> Any:
        return copies.to_host(self, "tolist").tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first.")
        return copies.to_host(self, "numpy").numpy()

    def is_pinned(self, *args: Any) -> bool:
        return False

    def __repr__(self, *args: Any, **kwargs: Any) -> str:
        return f"CudaTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    def __format__(self, spec: str) -> str:
        return format(self.item() if self.dim() == 0 else repr(self), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied = self.detach().clone()
            copied = torch.nn.Parameter(copied, self.requires_grad) if isinstance(self, torch.nn.Parameter) else copied
            memo[id(self)] = copied.requires_grad_(self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copies.from_host, (copies.to_host(self, "pickle"), self.get_device(), self.requires_grad)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return kernels.dispatch(func, args, kwargs or {})


def wrap(raw: torch.Tensor, block: Block) -> CudaTensor:
    """The tensor that `raw` is in the memory of `block`."""
    # `.data` has a version counter of its own: autograd counts the program's writes, when it makes them, and not the kernels'
    made: CudaTensor = torch.Tensor._make_subclass(CudaTensor, raw.data)
    made.raw, made.block = raw, block
    return made


def new(device: Device, stream: Stream, shape: Any, stride: Any, dtype: torch.dtype) -> CudaTensor:
    """A tensor in fresh memory, with whatever is in it."""
    span = 1 + sum((n - 1) * s for n, s in zip(shape, stride)) if all(shape) else 0
    block = device.memory.allocate(span * dtype.itemsize, stream)
    return wrap(plain(block.memory.untyped_storage(), 0, shape, stride, dtype), block)


def plain(storage: Any, offset: int, shape: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    """An alias for kernels; they write to it in any mode."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)


def moved(x: Any, to: Any, args: Any, kwargs: Any) -> Any:
    """`x.to(...)`; `to` is torch's own."""
    kwargs = dict(kwargs)
    other = kwargs.pop("other", args[0] if args and isinstance(args[0], torch.Tensor) else None)
    copy = kwargs.pop("copy", False)
    if other is not None:
        target, dtype, non_blocking, layout = other.device, other.dtype, kwargs.get("non_blocking", args[1:2] == (True,)), None
    else:
        if len(args) > 3:
            copy, args = args[3], args[:3]
        target, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
    home = x.block.stream.device if isinstance(x, CudaTensor) else None
    device = home if target is None else device_for(target)
    if device is home:
        more = {} if layout is None else {"memory_format": layout}
        return to(x, dtype or x.dtype, non_blocking=bool(non_blocking), copy=bool(copy), **more)
    if x.requires_grad and torch.is_grad_enabled():
        return copies.Travel.apply(x, device, dtype or x.dtype, bool(non_blocking))
    if device is None:
        return copies.to_host(x.detach(), "cpu", dtype, non_blocking=bool(non_blocking))
    return copies.to_device(x.detach(), device, dtype, non_blocking=bool(non_blocking))


def touch(x: CudaTensor, raw: torch.Tensor, *, writes: bool) -> Touch:
    """The bytes that a kernel touches: from the first element to the last."""
    size = raw.element_size()
    low = raw.storage_offset() * size
    span = 1 + sum((n - 1) * s for n, s in zip(raw.shape, raw.stride())) if raw.numel() else 0
    return x.block, low, low + span * size, writes


from tests.simulated_cuda import copies, kernels  # noqa: E402  they need the class
