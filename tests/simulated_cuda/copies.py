"""Copies between host and device: which of them wait, and when they read and write host memory.

to the device, from pinned memory, non_blocking     a kernel: it reads host memory when it runs
to the host, into pinned memory, non_blocking       a kernel: until then the host reads NaN there
everything else                                     the host waits, and that is counted
"""

from __future__ import annotations

from typing import Any

import torch
from tests.simulated_cuda.device import Device
from tests.simulated_cuda.simulation import current_stream, process, simulation
from tests.simulated_cuda.tensor import CudaTensor, new, touch


def is_pinned(x: torch.Tensor) -> bool:
    """Whether host memory is page-locked."""
    return x.untyped_storage().data_ptr() in simulation().pinned


def pin(x: torch.Tensor) -> torch.Tensor:
    """A page-locked tensor like this one, with its values."""
    made = x.detach().clone()
    simulation().pinned[made.untyped_storage().data_ptr()] = made
    return made


def copy_(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """`target.copy_(source, non_blocking)` where at least one of them is on a device."""
    target, source = args[:2]
    non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    if not isinstance(source, CudaTensor):
        _upload(target, source, non_blocking)
    elif not isinstance(target, CudaTensor):
        _download(target, source, non_blocking, "copy to the host")
    else:
        _on_device(target, source)
    return target


def _on_device(target: Any, source: Any) -> None:
    to, come = target.raw, source.raw
    here, there = source.block.stream.device, target.block.stream.device
    if here.process is not there.process:
        raise RuntimeError(f"copy_: {here.process} and {there.process} share no device memory")
    stream = current_stream(here)
    if there is not here:  # as torch does: both current streams wait for each other
        stream.wait(current_stream(there).record())
    stream.launch("copy_", lambda: to.copy_(come), [touch(source, come, writes=False), touch(target, to, writes=True)])
    if there is not here:
        current_stream(there).wait(stream.record())


def _upload(target: Any, source: torch.Tensor, non_blocking: bool) -> None:
    to, device = target.raw, target.block.stream.device
    waits = not (non_blocking and is_pinned(source))
    plain = source.detach()
    if waits:
        with torch.inference_mode(False):
            plain = plain.clone()  # staged by the driver
    stream = current_stream(device)
    stream.launch("copy to the device", lambda: to.copy_(plain), [touch(target, to, writes=True)])
    if waits and source.numel():
        device.process.synced("copy from pageable memory" if non_blocking else "copy to the device", [stream.record()])


def _download(target: torch.Tensor, source: Any, non_blocking: bool, name: str) -> None:
    come, device = source.raw, source.block.stream.device
    stream, plain = current_stream(device), target.detach()
    if plain.is_contiguous():
        plain.view(-1).view(torch.uint8).fill_(0xFF)  # until the copy has run
    stream.launch(name, lambda: plain.copy_(come), [touch(source, come, writes=False)])
    if not (non_blocking and is_pinned(target)):
        device.process.synced(name, [stream.record()])


def _dense(x: torch.Tensor) -> Any:
    """The strides of a copy."""
    if x.is_contiguous():
        return x.stride()
    return torch.empty_like(torch.empty_strided(x.shape, x.stride(), device="meta")).stride()


def to_host(x: Any, name: str, dtype: torch.dtype | None = None, *, non_blocking: bool = False, pinned: bool = False) -> Any:
    """A copy in host memory."""
    with torch.inference_mode(False):
        out = torch.empty_strided(x.shape, _dense(x), dtype=dtype or x.dtype)
    if pinned:
        simulation().pinned[out.untyped_storage().data_ptr()] = out
    _download(out, x, non_blocking, name)
    return out


def to_device(x: torch.Tensor, device: Device, dtype: torch.dtype | None = None, *, non_blocking: bool = False) -> Any:
    """A copy in the memory of `device`."""
    made = new(device, current_stream(device), x.shape, _dense(x), dtype or x.dtype)
    if isinstance(x, CudaTensor):
        _on_device(made, x)
    else:
        _upload(made, x, non_blocking)
    return made


def from_host(x: torch.Tensor, index: int, requires_grad: bool) -> Any:
    """What was pickled."""
    return to_device(x, process().device(index)).requires_grad_(requires_grad)


class Travel(torch.autograd.Function):
    """To another device and back in backward; `device` is None for the host."""

    @staticmethod
    def forward(ctx: Any, x: Any, device: Device | None, dtype: torch.dtype, non_blocking: bool) -> Any:
        ctx.home, ctx.dtype = x.device, x.dtype
        if device is None:
            return to_host(x, "cpu", dtype, non_blocking=non_blocking)
        return to_device(x, device, dtype, non_blocking=non_blocking)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        home = process().device(ctx.home.index) if ctx.home.type == "cuda" else None
        return to_host(grad, "cpu", ctx.dtype) if home is None else to_device(grad, home, ctx.dtype), None, None, None
