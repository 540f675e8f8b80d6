"""What a checkpoint can hold: how the state of each kind of object is taken, compared with a saved one, and filled in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from phalanx.train.tree import Tensors, encode

SHOWN = 20  # differences in one message


@dataclass(frozen=True, slots=True)
class Entry:
    """The state of one object: its tree and tensors, and for an optimizer the shapes of what it optimises."""

    kind: str
    tree: Any
    tensors: Tensors = field(default_factory=dict)
    shapes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Saved:
    """An entry as it was read."""

    kind: str
    value: Any
    shapes: tuple[tuple[int, ...], ...] = ()


def check_saved(saved: Saved) -> Saved:
    """`saved`, if its value is of the form that its kind has; ValueError says what is not."""
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
    """As torch writes it: groups that number their parameters, and a dict of state for some of these numbers."""
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
    """ "module", "optimizer", "tensor", "data" or "object"; TypeError for what could not be filled in place at the next load."""
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
    """The state of `obj`; its tensors are still the live ones."""
    kind = kind_of(obj, name)
    return Entry(kind, *encode(state_of(obj), name), shapes=_shapes(obj) if kind == "optimizer" else ())


def fill(obj: Any, value: Any) -> None:
    """Put a state into `obj`."""
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


def differences(name: str, obj: Any, saved: Saved) -> list[str]:
    """Why `saved` is not a state of `obj`, in words; empty where it is."""
    kind = kind_of(obj, name)
    if kind != saved.kind:
        return [f"{name}: {_article(saved.kind)} in the checkpoint, {_article(kind)} here"]
    if kind == "module":
        return _compare_mappings(name, obj.state_dict(), saved.value)
    if kind == "optimizer":
        return _compare_optimizers(name, obj, saved)
    if kind == "tensor":
        return _compare_values(name, obj, saved.value)
    return []


def compare_plain(name: str, here: Any, there: Any) -> list[str]:
    """Where two plain values, such as configurations, differ."""
    if isinstance(here, dict) and isinstance(there, dict):
        found = []
        for key in [*here, *(key for key in there if key not in here)]:
            if key not in here or key not in there:
                found.append(f"{name}.{key}: only {'here' if key in here else 'in the checkpoint'}")
            else:
                found += compare_plain(f"{name}.{key}", here[key], there[key])
        return found
    if isinstance(here, list | tuple) and type(here) is type(there) and len(here) == len(there):
        return [line for i in range(len(here)) for line in compare_plain(f"{name}[{i}]", here[i], there[i])]
    same = type(here) is type(there) and (here == there or (here != here and there != there))
    return [] if same else [f"{name}: {there!r} in the checkpoint, {here!r} here"]


def some(lines: list[str]) -> str:
    """Lines of a message, not more than a person reads."""
    more = [f"... and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return "".join(f"\n  {line}" for line in [*lines[:SHOWN], *more])


def _compare_mappings(name: str, here: Mapping[str, Any], there: Any) -> list[str]:
    if not isinstance(there, dict):
        return [f"{name}: a {type(there).__name__} in the checkpoint"]
    found = [f"{name}.{key}: only here" for key in here if key not in there]
    found += [f"{name}.{key}: only in the checkpoint" for key in there if key not in here]
    return found + [line for key in here if key in there for line in _compare_values(f"{name}.{key}", here[key], there[key])]


def _compare_values(name: str, here: Any, there: Any) -> list[str]:
    if not isinstance(here, torch.Tensor) and not isinstance(there, torch.Tensor):
        return []  # a module's extra state: its own affair
    a, b = _kind_of_value(there), _kind_of_value(here)
    return [] if a == b else [f"{name}: {a} in the checkpoint, {b} here"]


def _compare_optimizers(name: str, optimizer: torch.optim.Optimizer, saved: Saved) -> list[str]:
    groups, others = optimizer.param_groups, saved.value.get("param_groups", [])
    counts, other_counts = [len(g["params"]) for g in groups], [len(g["params"]) for g in others]
    if counts != other_counts:
        return [f"{name}.param_groups: {other_counts} parameters in the checkpoint, {counts} here"]
    found = []
    for i, (group, other) in enumerate(zip(groups, others)):
        # schedulers add the first; torch keeps names only where it was given them
        odd = (group.keys() ^ other.keys()) - {"initial_lr", "param_names"}
        found += [
            f"{name}.param_groups[{i}][{key!r}]: only {'here' if key in group else 'in the checkpoint'}"
            for key in sorted(odd, key=str)
        ]
    found += [
        f"{name}: parameter {i} has shape {there} in the checkpoint, {here} here"
        for i, (here, there) in enumerate(zip(_shapes(optimizer), saved.shapes))
        if here != there
    ]
    return found


def _shapes(optimizer: torch.optim.Optimizer) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(p.shape) for group in optimizer.param_groups for p in group["params"])


def _kind_of_value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__


def _article(kind: str) -> str:
    return {"object": "an object with state_dict()", "optimizer": "an optimizer", "data": "plain data"}.get(kind, f"a {kind}")
