"""Encode nested state as JSON that refers to its tensors by name: exactly, and without pickle.

    encode({"lr": 0.1, 3: (w, None)}, "opt")
    -> {"pairs": [["lr", 0.1], [3, {"tuple": [{"tensor": "opt/3.0", ...}, null]}]]},  {"opt/3.0": w}

JSON's own null, true, false, whole numbers, finite numbers, strings and lists mean themselves. Everything else is an object with
the tag of its kind, so that tuples stay tuples, keys keep their types and a NaN its bits.
"""

from __future__ import annotations

import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch

from phalanx.comm.envelope import bytes_of
from phalanx.schedule.plain_json import brief

MAX_DEPTH = 200  # deeper data must be a cycle
LARGEST = 1 << 62  # of a size
EXACT = 1 << 53  # whole numbers beyond it are not exact in other readers of JSON

# The dtypes of safetensors; tensors of other dtypes are stored as bytes
NATIVE = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip

DENSE: tuple[type, ...] = (torch.Tensor,)  # exactly this class: a subclass may have no memory of its own

Tensors = dict[str, torch.Tensor]


def encode(value: Any, name: str) -> tuple[Any, Tensors]:
    """The JSON of `value` and its tensors, not copied, under names that begin with `name`.

    Two references to one tensor are two references to one name. TypeError names the first element that cannot be stored.
    """
    return (encoder := _Encoder(name)).walk(value, "", 0), encoder.tensors


def decode(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Decode the output of `encode`. ValueError if `tree` or `tensors` are not its output."""
    return _Decoder(tensors).walk(tree, 0)


def references(tree: Any) -> set[str]:
    """The names of the tensors in a tree of `encode`, of any depth."""
    found: set[str] = set()
    waiting = [tree]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict) and isinstance(name := item.get("tensor"), str):
            found.add(name)
        elif isinstance(item, dict | list):
            waiting += item.values() if isinstance(item, dict) else item
    return found


def clone(value: Any) -> Any:
    """A copy of `value` that shares no memory with it; tensors that are shared inside `value` are shared inside the copy."""
    tree, tensors = encode(value, "copy")
    return decode(tree, {name: x.detach().clone() for name, x in tensors.items()})


def dense_stride(x: torch.Tensor) -> tuple[int, ...] | None:
    """The strides of a copy of `x` if it fills its memory in another order, such as channels_last; None if contiguous."""
    if x.is_contiguous():
        return None
    copy = torch.empty_like(x, device="meta")
    return None if copy.is_contiguous() else copy.stride()


def storable(x: torch.Tensor) -> torch.Tensor:
    """`x` in the form for a file: contiguous, with a dtype of the file format."""
    x = x.contiguous()
    return x if x.dtype in NATIVE else bytes_of(x)


class _Encoder:
    def __init__(self, name: str) -> None:
        self.name = name
        self.tensors: Tensors = {}
        self._known: dict[tuple[Any, ...], str] = {}

    def walk(self, value: Any, path: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise TypeError(f"{self.name}: {path[:60]}... is nested more than {MAX_DEPTH} deep: a cycle?")
        kind = type(value)  # not isinstance: a subclass would come back as its base
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if -EXACT <= value <= EXACT else {"int": hex(value)}
        if kind is float:
            finite = value - value == 0.0
            return value if finite else {"float": struct.pack(">d", value).hex()}
        if kind is list:
            return self._items(value, path, depth)
        if kind is tuple:
            return {"tuple": self._items(value, path, depth)}
        if kind is torch.Size:
            return {"size": list(value)}
        if kind is dict:
            return {"pairs": self._pairs(value, path, depth)}
        if kind is Counter:  # the milestones of a scheduler
            return {"counter": self._pairs(value, path, depth)}
        if kind is OrderedDict:  # a module's state, which has versions as an attribute
            versions = self.walk(getattr(value, "_metadata", None), f"{path}._metadata", depth + 1)
            return {"ordered": self._pairs(value, path, depth), "metadata": versions}
        if kind is bytes:
            return {"bytes": value.hex()}
        if kind is torch.dtype:
            return {"dtype": str(value).removeprefix("torch.")}
        if kind is torch.device:
            return {"device": str(value)}
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, numpy.generic) and value.dtype.kind in "biufc":
            return {"scalar": value.dtype.str, "bytes": value.tobytes().hex()}
        if isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
            native = numpy.array(value, value.dtype.newbyteorder("="))
            return {"array": self._tensor(torch.from_numpy(native), path), "kind": value.dtype.str}
        raise TypeError(
            f"{self.name}: {path or 'the value'} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold: "
            "state is None, bool, int, float, str, bytes, list, tuple, dict, tensors, NumPy arrays, dtypes and devices"
        )

    def _items(self, values: Any, path: str, depth: int) -> list[Any]:
        return [self.walk(item, _below(path, i), depth + 1) for i, item in enumerate(values)]

    def _pairs(self, values: Mapping[Any, Any], path: str, depth: int) -> list[Any]:
        return [
            [self.walk(key, f"a key of {path or 'the value'}", depth + 1), self.walk(item, _below(path, key), depth + 1)]
            for key, item in values.items()
        ]

    def _tensor(self, x: torch.Tensor, path: str) -> dict[str, Any]:
        x = x.detach()
        if type(x) not in DENSE or x.layout is not torch.strided or x.is_quantized or x.is_meta:
            raise TypeError(
                f"{self.name}: {path or 'the value'} is a {type(x).__name__} with {x.layout}, {x.dtype}, on {x.device}: "
                "a checkpoint holds dense tensors"
            )
        place = (x.untyped_storage().data_ptr(), x.storage_offset(), x.shape, x.stride(), x.dtype, x.is_conj(), x.is_neg())
        name = self._known.get(place) if x.numel() else None
        if name is None:
            name = base = f"{self.name}/{path}" if path else self.name
            copies = 1
            while name in self.tensors:  # {"a": {"b": x}, "a.b": y}
                copies += 1
                name = f"{base}#{copies}"
            self._known[place] = name
            self.tensors[name] = x.resolve_conj().resolve_neg()
        found = {"tensor": name, "dtype": str(x.dtype).removeprefix("torch."), "shape": list(x.shape)}
        stride = dense_stride(x)
        return found if stride is None else found | {"stride": list(stride)}


def _below(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


class _Decoder:
    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._made: Tensors = {}
        self._arrays: set[str] = set()
        self._tags: dict[str, Callable[[dict[str, Any], int], Any]] = {
            "int": lambda tree, depth: int(_text(tree["int"]), 16),
            "float": lambda tree, depth: struct.unpack(">d", bytes.fromhex(tree["float"]))[0],
            "tuple": lambda tree, depth: tuple(self.walk(item, depth + 1) for item in _list(tree["tuple"])),
            "size": lambda tree, depth: torch.Size(_sizes(tree["size"])),
            "pairs": lambda tree, depth: dict(self._pairs(tree["pairs"], depth)),
            "counter": lambda tree, depth: Counter(dict(self._pairs(tree["counter"], depth))),
            "ordered": self._ordered,
            "bytes": lambda tree, depth: bytes.fromhex(tree["bytes"]),
            "dtype": lambda tree, depth: _dtype(tree["dtype"]),
            "device": lambda tree, depth: torch.device(_text(tree["device"])),
            "tensor": self._tensor,
            "scalar": lambda tree, depth: _scalar(tree["scalar"], bytes.fromhex(tree["bytes"])),
            "array": self._array,
        }

    def walk(self, tree: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} deep")
        if tree is None or isinstance(tree, bool | int | float | str):
            return tree
        if isinstance(tree, list):
            return [self.walk(item, depth + 1) for item in tree]
        tag = next(iter(tree), None) if isinstance(tree, dict) else None
        if tag not in self._tags:
            raise ValueError(f"unknown tag {brief(tag)}")
        try:
            return self._tags[tag](tree, depth)
        except (KeyError, TypeError, AttributeError, RuntimeError, OverflowError, struct.error) as error:
            raise ValueError(f"malformed {tag}: {str(error)[:200]}") from None

    def _pairs(self, pairs: Any, depth: int) -> list[tuple[Any, Any]]:
        return [(self.walk(key, depth + 1), self.walk(item, depth + 1)) for key, item in _list(pairs)]

    def _ordered(self, tree: dict[str, Any], depth: int) -> OrderedDict[Any, Any]:
        found = OrderedDict(self._pairs(tree["ordered"], depth))
        if (versions := self.walk(tree["metadata"], depth + 1)) is not None:
            found._metadata = versions  # type: ignore[attr-defined]
        return found

    def _tensor(self, tree: dict[str, Any], depth: int) -> torch.Tensor:
        name, shape, dtype = _text(tree["tensor"]), _sizes(tree["shape"]), _dtype(tree["dtype"])
        if name not in self._made:
            x = self._tensors[name]
            if x.dtype is not dtype:
                x = x.contiguous().view(-1).view(dtype).view(shape)
            if list(x.shape) != shape:
                raise ValueError(f"{brief(name)} has shape {list(x.shape)}, wanted {brief(shape)}")
            if "stride" in tree:
                x = torch.empty_strided(shape, _dense(_sizes(tree["stride"]), shape), dtype=dtype).copy_(x)
            self._made[name] = x
        return self._made[name]

    def _array(self, tree: dict[str, Any], depth: int) -> numpy.ndarray:
        name = _text(tree["array"]["tensor"])
        if name in self._arrays:  # each one is copied: many references would fill the memory
            raise ValueError(f"{brief(name)} is an array twice")
        self._arrays.add(name)
        found = self._tensor(tree["array"], depth).numpy()
        kind = _number_type(tree["kind"])
        if kind.newbyteorder("=") != found.dtype:
            raise ValueError(f"{brief(name)} is of {found.dtype}, not {kind}")
        return found.astype(kind)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{brief(value)} is not a text")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{brief(value)} is not a list")
    return value


def _sizes(value: Any) -> list[int]:
    if not all(type(size) is int and 0 <= size < LARGEST for size in _list(value)):
        raise ValueError(f"{brief(value)} are no sizes")
    return value


def _dense(strides: list[int], shape: list[int]) -> list[int]:
    """Check that the strides leave no gaps: others could allocate any amount of memory."""
    if len(strides) != len(shape):
        raise ValueError(f"{len(strides)} strides for {len(shape)} dimensions")
    filled = 1
    for stride, size in sorted(zip(strides, shape)):
        if size > 1 and stride != filled:
            raise ValueError(f"strides {brief(strides)} leave gaps in shape {brief(shape)}")
        filled *= size
    return strides


def _scalar(kind: Any, content: bytes) -> Any:
    number = _number_type(kind)
    if len(content) != number.itemsize:
        raise ValueError(f"{len(content)} bytes are no {number}")
    return numpy.frombuffer(content, number)[0]


def _number_type(kind: Any) -> numpy.dtype:
    """A number type by its `dtype.str`. NumPy itself accepts far more, such as strings of a billion bytes."""
    if not re.fullmatch(r"[<>|][biufc][0-9]{1,2}", _text(kind)):
        raise ValueError(f"{brief(kind)} is not a number type")
    return numpy.dtype(kind)


def _dtype(name: Any) -> torch.dtype:
    found = getattr(torch, _text(name), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no dtype {brief(name)}")
    return found
