"""Describe how a saved state differs from the one to fill, one line per difference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from phalanx.train.checkpoint.entries import SavedEntry, kind_of, shapes_of

SHOWN = 20  # differences in one message


def differences(name: str, obj: Any, saved: SavedEntry) -> list[str]:
    """Why `saved` does not fit `obj`, one line per reason; empty if it fits."""
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
    """Lines of a message, at most SHOWN of them."""
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
        return []  # a module's extra state: only the module can compare it
    a, b = _kind_of_value(there), _kind_of_value(here)
    return [] if a == b else [f"{name}: {a} in the checkpoint, {b} here"]


def _compare_optimizers(name: str, optimizer: torch.optim.Optimizer, saved: SavedEntry) -> list[str]:
    groups, others = optimizer.param_groups, saved.value.get("param_groups", [])
    counts, other_counts = [len(g["params"]) for g in groups], [len(g["params"]) for g in others]
    if counts != other_counts:
        return [f"{name}.param_groups: {other_counts} parameters in the checkpoint, {counts} here"]
    found = []
    for i, (group, other) in enumerate(zip(groups, others)):
        # schedulers add the first; torch keeps names only if it got some
        odd = (group.keys() ^ other.keys()) - {"initial_lr", "param_names"}
        found += [
            f"{name}.param_groups[{i}][{key!r}]: only {'here' if key in group else 'in the checkpoint'}"
            for key in sorted(odd, key=str)
        ]
    found += [
        f"{name}: parameter {i} has shape {there} in the checkpoint, {here} here"
        for i, (here, there) in enumerate(zip(shapes_of(optimizer), saved.shapes))
        if here != there
    ]
    return found


def _kind_of_value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__


def _article(kind: str) -> str:
    return {"object": "an object with state_dict()", "optimizer": "an optimizer", "data": "plain data"}.get(kind, f"a {kind}")
