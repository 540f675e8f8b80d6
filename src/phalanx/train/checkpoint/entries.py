"""What a checkpoint can hold: how to take the state of each kind of object, and how to fill it in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from phalanx.train.checkpoint.tree import Tensors, encode


@dataclass(frozen=True, slots=True)
class Entry:
    """The state of one object: its tree and tensors, and for an optimizer the shapes of its parameters."""

    kind: str
    tree: Any
    tensors: Tensors = field(default_factory=dict)
    shapes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class SavedEntry:
    """An entry as read from a checkpoint."""

    kind: str
    value: Any
    shapes: tuple[tuple[int, ...], ...] = ()


def check_saved(saved: SavedEntry) -> SavedEntry:
    """Check that the value of `saved` has the form of its kind. ValueError names what does not."""
    value = saved.value
    if saved.kind == "module" and not (isinstance(value, dict) and all(isinstance(key, str) for key in value)):
        raise ValueError("the state of a module has a name for each part")
    if saved.kind == "optimizer":
        _check_optimizer(value)
    if saved.kind == "tensor" and not isinstance(value, torch.Tensor):
        raise ValueError(f"a {type(value).__name__} where a tensor was saved")
    if saved.kind == "data" and type(value) not in (dict, list):
        raise ValueError(f"a {type(value).__name__} where a dict or list was saved")
    return saved


def _check_optimizer(value: Any) -> None:
    """Check torch's form: groups that number their parameters, and state for some of these numbers."""
    groups = value.get("param_groups") if isinstance(value, dict) else None
    state = value.get("state") if isinstance(value, dict) else None
    if not isinstance(groups, list) or not isinstance(state, dict):
        raise ValueError("an optimizer has `state` and `param_groups`")
    numbers: list[Any] = []
    for group in groups:
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):
            raise ValueError("a group of an optimizer has `params`")
        numbers += group["params"]
    if not all(type(number) is int for number in numbers) or len(set(numbers)) < len(numbers):
        raise ValueError("the parameters of an optimizer are numbers, each once")
    if not all(isinstance(own, dict) and all(isinstance(key, str) for key in own) for own in state.values()):
        raise ValueError("the state of a parameter has a name for each part")


def kind_of(obj: Any, name: str) -> str:
    """ "module", "optimizer", "tensor", "data" or "object"; TypeError if `load` could not fill it in place."""
    if isinstance(obj, torch.nn.Module):
        return "module"
    if isinstance(obj, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(obj, torch.Tensor):
        return "tensor"
    if type(obj) in (dict, list):
        return "data"
    if callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None)):
        return "object"
    raise TypeError(
        f"{name} is a {type(obj).__module__}.{type(obj).__qualname__}: a checkpoint fills things in place, so it takes tensors, "
        f"dicts, lists and what has state_dict() and load_state_dict(). Put a plain value into a dict: progress={{{name!r}: ...}}"
    )


def state_of(obj: Any) -> Any:
    """The state itself, not copied."""
    return obj if isinstance(obj, torch.Tensor) or type(obj) in (dict, list) else obj.state_dict()


def capture(name: str, obj: Any) -> Entry:
    """Take the state of `obj`. Its tensors are not copied."""
    kind = kind_of(obj, name)
    return Entry(kind, *encode(state_of(obj), name), shapes=shapes_of(obj) if kind == "optimizer" else ())


def fill(obj: Any, value: Any) -> None:
    """Load a state into `obj`."""
    if isinstance(obj, torch.Tensor):
        with torch.no_grad():
            obj.copy_(value)
    elif type(obj) is dict:
        obj.clear()
        obj.update(value)
    elif type(obj) is list:
        obj[:] = value
    else:
        obj.load_state_dict(value)


def shapes_of(optimizer: torch.optim.Optimizer) -> tuple[tuple[int, ...], ...]:
    """The shapes of all parameters that an optimizer has."""
    return tuple(tuple(p.shape) for group in optimizer.param_groups for p in group["params"])


def named(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check that `state` has names and can be saved."""
    if not state:
        raise ValueError("nothing to save or load: name the state, as in save(step, model=model, optimizer=opt)")
    for name, obj in state.items():
        if not name.isidentifier():
            raise ValueError(f"{name!r} is not a name for state: use a Python identifier")
        kind_of(obj, name)
    return state
