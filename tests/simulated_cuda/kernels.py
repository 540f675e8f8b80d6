"""Operations on device tensors: what torch calls becomes a view, a kernel in a queue, or a wait of the host.

a view              shares the block, now
writes in place     a kernel on the current stream of the tensor's device
returns new ones    memory is allocated now (the shapes are those of the same call on zeros), a kernel fills it later
reads a value       the host waits, and that is counted
"""

from __future__ import annotations

from typing import Any

import torch
from tests.simulated_cuda import copies
from tests.simulated_cuda.device import Device
from tests.simulated_cuda.simulation import current_stream, process
from tests.simulated_cuda.tensor import CudaTensor, new, plain, touch, wrap

aten = torch.ops.aten


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """One operation of torch's, below autograd."""
    special = SPECIAL.get(func)
    if special is not None:
        return special(func, args, kwargs)
    plan = _plans.get(func)
    if plan is None:
        plan = _plans[func] = _Plan(func)
    return _view(func, args, kwargs) if plan.view else _launch(func, plan, args, kwargs)


class _Plan:
    """What the schema says."""

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name = str(func).removeprefix("aten.")
        self.view = func.is_view
        if torch.Tag.inplace_view in func.tags:
            raise NotImplementedError(f"{func} changes the shape of a tensor in place")
        self.written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        self.names = [a.name for a in schema.arguments]
        # those of its results that are arguments, by position
        sources = {
            next(iter(a.alias_info.before_set), None): i for i, a in enumerate(schema.arguments) if a.alias_info is not None
        }
        self.returned = [
            sources.get(next(iter(r.alias_info.before_set), None)) if r.alias_info is not None else None for r in schema.returns
        ]
        self.random = torch.Tag.nondeterministic_seeded in func.tags
        self.empty = func.overloadpacket in (aten.empty_like, aten.new_empty, aten.new_empty_strided)
        self.in_place = bool(self.written) and all(r is not None for r in self.returned)
        self.returns_list = bool(schema.returns) and isinstance(schema.returns[0].type, torch.ListType)
        self.returns_one = len(schema.returns) == 1 and not self.returns_list


_plans: dict[Any, _Plan] = {}
_shapes: dict[Any, list[tuple[Any, Any, torch.dtype] | None]] = {}


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    base = args[0]
    if base.requires_grad:
        used(base)
    out = func(base.raw, *args[1:], **kwargs)
    if isinstance(out, torch.Tensor):
        return wrap(out, base.block)
    return type(out)(wrap(x, base.block) for x in out)


def _launch(func: Any, plan: _Plan, args: Any, kwargs: Any) -> Any:
    tensors: list[CudaTensor] = []
    raw_args, raw_kwargs = _unwrapped(args, kwargs, tensors, func)
    device = device_of(tensors, func)
    stream = current_stream(device)
    bound = dict(zip(plan.names, args)) | kwargs
    written = {id(x) for name in plan.written for x in _tensors(bound.get(name))}
    outputs: list[CudaTensor | None] = []
    if not plan.in_place:
        outputs = [kind and new(device, stream, *kind) for kind in metadata(func, raw_args, raw_kwargs)]
    if not plan.empty:
        seed = draw(device) if plan.random else None
        landing = [x.raw for x in outputs if x is not None]

        def run() -> None:
            if seed is not None:
                _seeded(seed, lambda: _fill(func(*raw_args, **raw_kwargs), landing))
            else:
                _fill(func(*raw_args, **raw_kwargs), landing)

        touches = [touch(x, x.raw, writes=id(x) in written) for x in tensors]
        touches += [touch(x, x.raw, writes=True) for x in outputs if x is not None]
        stream.launch(plan.name, run, touches)
    if not plan.in_place:
        return outputs[0] if plan.returns_one else outputs if plan.returns_list else tuple(outputs)
    found = [bound[plan.names[i]] for i in plan.returned if i is not None]
    return None if not found else found[0] if len(found) == 1 else tuple(found)


def _unwrapped(args: Any, kwargs: Any, tensors: list[CudaTensor], func: Any) -> tuple[Any, Any]:
    """The arguments of the kernel; the device tensors among them go to `tensors`, too."""
    raw_kwargs = {k: _plain_argument(x, tensors, func) for k, x in kwargs.items() if k not in ("device", "pin_memory")}
    return [_plain_argument(x, tensors, func) for x in args], raw_kwargs


def used(x: CudaTensor) -> None:
    """Note the stream on which forward first uses a parameter: its gradient will be added there (autograd.py)."""
    if "used_on" not in vars(x) and torch.is_grad_enabled() and x.is_leaf:
        x.used_on = current_stream(x.block.stream.device)  # type: ignore[attr-defined]


def _plain_argument(x: Any, tensors: list[CudaTensor], func: Any) -> Any:
    if isinstance(x, CudaTensor):
        tensors.append(x)
        if x.requires_grad:
            used(x)
        return x.raw
    if isinstance(x, torch.Tensor):
        return _host_scalar(x, func)
    return [_plain_argument(y, tensors, func) for y in x] if isinstance(x, list | tuple) else x


def device_of(tensors: list[CudaTensor], func: Any) -> Device:
    """The one device of all of these."""
    device = tensors[0].block.stream.device
    for x in tensors:
        if x.block.stream.device is not device:
            other = x.block.stream.device
            raise RuntimeError(
                f"{func}: expected all tensors to be on one device of one process, "
                f"got {device.process}'s {device} and {other.process}'s {other}"
            )
    if device.process is not process():
        raise RuntimeError(f"{func}: {process()} uses a tensor of {device.process}: processes share no device memory")
    return device


def _host_scalar(x: torch.Tensor, func: Any) -> Any:
    """A number on the host is part of the kernel's arguments; larger tensors must be on the device."""
    if x.dim():
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, but found cuda and cpu {tuple(x.shape)}")
    with torch.inference_mode(False):
        return x.detach().clone()


def _tensors(x: Any) -> list[Any]:
    return [x] if isinstance(x, torch.Tensor) else [] if x is None else [y for y in x if y is not None]


def metadata(func: Any, args: Any, kwargs: Any) -> list[tuple[Any, Any, torch.dtype] | None]:
    """Shape, stride and dtype of the results: those of the same call on zeros. Remembered by what the arguments are.

    None for a result that was not asked for, such as the gradient of a convolution's input.
    """
    key = (func, _described(args), _described(list(kwargs.items())))
    found = _shapes.get(key)
    if found is None:
        with torch.no_grad(), torch.inference_mode(False):
            out = func(*(_zeros(x) for x in args), **{name: _zeros(x) for name, x in kwargs.items()})
        results = [out] if isinstance(out, torch.Tensor) else out or []
        found = _shapes[key] = [None if x is None else (x.shape, x.stride(), x.dtype) for x in results]
    return found


def _described(xs: Any) -> Any:
    return tuple(
        (x.shape, x.stride(), x.dtype)
        if isinstance(x, torch.Tensor)
        else _described(x)
        if isinstance(x, list | tuple)
        else (type(x), x)
        for x in xs
    )


def _zeros(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).zero_()
    return [_zeros(y) for y in x] if isinstance(x, list) else x


def _fill(results: Any, landing: list[torch.Tensor]) -> None:
    if landing:
        for target, x in zip(landing, _tensors(results)):
            target.copy_(x)


def draw(device: Device) -> int:
    """The next random number of the device: drawn by the host, as CUDA's are."""
    seed, offset = device.random
    device.random[1] += 1
    return hash((seed, offset)) & 0x7FFF_FFFF


def _seeded(seed: int, run: Any) -> None:
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    run()
    torch.set_rng_state(before)


def _read(func: Any, args: Any, kwargs: Any) -> Any:
    """The host needs values."""
    tensors: list[CudaTensor] = []
    raw_args, raw_kwargs = _unwrapped(args, kwargs, tensors, func)
    device = device_of(tensors, func)
    name = {"_local_scalar_dense": "item"}.get(func.overloadpacket.__name__, func.overloadpacket.__name__)
    stream = current_stream(device)
    stream.launch(name, lambda: None, [touch(x, x.raw, writes=False) for x in tensors])
    device.process.synced(name, [stream.record()])
    out = func(*raw_args, **raw_kwargs)
    if not isinstance(out, torch.Tensor):
        return out
    made = new(device, stream, out.shape, out.stride(), out.dtype)
    landing = made.raw
    stream.launch(name, lambda: landing.copy_(out), [touch(made, landing, writes=True)])
    return made


def _to_copy(func: Any, args: Any, kwargs: Any) -> Any:
    """`x.to(...)` below autograd, to another dtype or memory format on the same device."""
    x = args[0]
    come, stream = x.raw, current_stream(x.block.stream.device)
    (kind,) = metadata(func, [come], {name: kwargs[name] for name in ("dtype", "memory_format") if name in kwargs})
    made = new(stream.device, stream, *kind)
    to = made.raw
    stream.launch("to", lambda: to.copy_(come), [touch(x, come, writes=False), touch(made, to, writes=True)])
    return made


def _set(func: Any, args: Any, kwargs: Any) -> Any:
    """`x.set_(storage, ...)`: the same memory under another tensor."""
    x = args[0]
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Python)):
        func(*args, **kwargs)
    storage = x.untyped_storage()
    block = x.block.stream.device.memory.blocks.get(storage.data_ptr())
    if block is None:
        raise RuntimeError("this storage lies in memory that the simulation did not allocate")
    x.raw, x.block = plain(storage, x.storage_offset(), x.size(), x.stride(), x.dtype), block
    return x


SPECIAL: dict[Any, Any] = {
    aten.copy_.default: copies.copy_,
    aten._to_copy.default: _to_copy,
    aten._local_scalar_dense.default: _read,
    aten.nonzero.default: _read,
    aten.masked_select.default: _read,
    aten.equal.default: _read,
    aten.set_.source_Storage_storage_offset: _set,
    aten.set_.source_Tensor: _set,
    aten.set_.source_Storage: _set,
}
