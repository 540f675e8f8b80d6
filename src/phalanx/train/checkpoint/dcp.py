"""Checkpoints of `torch.distributed.checkpoint` (DCP), for programs that use FSDP, torchtitan or plain torch.

    save_dcp("exported", model=model, optimizer=opt)      # on one rank: replicas are equal
    load_dcp("theirs", model=model, optimizer=opt)        # on every rank

Optimizer state refers to parameters by name, as torch's `get_state_dict` writes it, so that the order of parameters does
not matter.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from phalanx.train.checkpoint.dcp_read import read_dcp
from phalanx.train.checkpoint.differences import differences, some
from phalanx.train.checkpoint.entries import SavedEntry, check_saved, fill, kind_of, state_of
from phalanx.train.checkpoint.errors import CheckpointError
from phalanx.train.checkpoint.tree import clone

__all__ = ["load_dcp", "read_dcp", "save_dcp"]

WRAPPERS = ("module.", "_orig_mod.")  # prefixes that DistributedDataParallel and torch.compile add to names


def save_dcp(directory: str | os.PathLike[str], **state: Any) -> None:
    """Write a directory that `torch.distributed.checkpoint.load` reads, on any number of ranks. Call it on one rank.

    Args:
        directory: A directory that does not exist yet. It appears when it is complete.
        **state: Modules, optimizers, tensors, dicts, lists and objects with `state_dict()`, by the name of their entry.

    Raises:
        CheckpointError: If the directory exists, or cannot be written.

    Example:
        >>> import tempfile, torch
        >>> from phalanx.train.checkpoint.dcp import load_dcp, save_dcp
        >>> model, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     save_dcp(f"{directory}/saved", model=model)
        ...     load_dcp(f"{directory}/saved", model=other)
        >>> torch.equal(model.weight, other.weight)
        True
    """
    from phalanx.train.checkpoint.dcp_write import write_dcp  # here, because it imports much of torch

    names = _names(state.values())
    values = {name: (kind_of(obj, name), state_of(obj)) for name, obj in state.items()}
    write_dcp(
        Path(directory),
        {
            name: optimizer_by_name(value, _names_of(state[name], names)) if kind == "optimizer" else value
            for name, (kind, value) in values.items()
        },
    )


def load_dcp(directory: str | os.PathLike[str], **state: Any) -> None:
    """Fill `state` from a directory that `torch.distributed.checkpoint.save` wrote, on any number of ranks. Call it on all ranks.

    Names of parameters may begin with `module.` or `_orig_mod.`, as DistributedDataParallel and torch.compile write them.

    Args:
        directory: The directory.
        **state: The objects to fill in place, by the names of their entries. Pass the model along with an optimizer that was not
            made from named parameters.

    Raises:
        CheckpointError: If the directory is damaged or belongs to another model. The message lists the differences, and nothing
            is changed.
    """
    path = Path(directory)
    read = read_dcp(path, *state)
    names = _names(state.values())
    saved: dict[str, SavedEntry] = {}
    found: list[str] = []
    for name, obj in state.items():
        kind, value = kind_of(obj, name), read[name]
        if kind == "module":
            value = unwrapped(value, obj.state_dict())
        elif kind == "optimizer":
            value = optimizer_by_number(value, _names_of(obj, names), obj.state_dict())
        try:
            saved[name] = check_saved(SavedEntry(kind, value))
        except ValueError as error:
            found.append(f"{name}: {error}")
            continue
        found += differences(name, obj, saved[name])
    if found:
        raise CheckpointError(f"{path} belongs to something else, and nothing was loaded; the differences:{some(found)}")
    backups = {name: clone(state_of(obj)) for name, obj in state.items()}
    filled: list[str] = []
    try:
        for name, obj in state.items():
            filled.append(name)
            fill(obj, saved[name].value)
    except BaseException:
        for name in filled:
            fill(state[name], backups[name])
        raise


def unwrapped(value: Any, wanted: Mapping[str, Any]) -> Any:
    """Strip the prefixes that wrappers add to a module's state, unless the module itself has them."""
    if not isinstance(value, dict):
        return value
    return {key if key in wanted else _bare(key): own for key, own in value.items()}


def _bare(key: Any) -> Any:
    while isinstance(key, str) and key.startswith(WRAPPERS):
        key = key.partition(".")[2]
    return key.replace("._orig_mod.", ".") if isinstance(key, str) else key


# ---- optimizers ----------------------------------------------------------------------------------------------------------------


def optimizer_by_name(value: dict[str, Any], names: list[str] | None = None) -> dict[str, Any]:
    """Replace parameter numbers in an optimizer's state by names, if there are any."""
    groups = value["param_groups"]
    if names is None and all("param_names" in group for group in groups):
        names = [name for group in groups for name in group["param_names"]]
    numbers = [number for group in groups for number in group["params"]]
    if names is None or len(names) != len(numbers):
        return value
    named = dict(zip(numbers, names))
    return value | {
        "state": {named[number]: own for number, own in value["state"].items()},
        "param_groups": [
            {key: own for key, own in group.items() if key != "param_names"} | {"params": [named[n] for n in group["params"]]}
            for group in groups
        ],
    }


def optimizer_by_number(value: Any, names: list[str] | None, here: Mapping[str, Any]) -> Any:
    """Replace parameter names in an optimizer's state by their numbers `here`. Damage is left for `check_saved`."""
    if not isinstance(value, dict) or not isinstance(groups := value.get("param_groups"), list):
        return value
    state = value.get("state", {})  # before the first step there is none, and torch writes nothing
    used = [p for group in groups if isinstance(group, dict) for p in group.get("params", ()) or ()]
    if not isinstance(state, dict):
        return value
    if all(isinstance(p, int) for p in used):
        return value | {"state": {int(key) if str(key).isdecimal() else key: own for key, own in state.items()}}
    if names is None:
        raise CheckpointError(
            "the optimizer's parameters have names in the checkpoint, but not here: give the model along with it, "
            "load_dcp(directory, model=model, optimizer=optimizer)"
        )
    ours = [number for group in here["param_groups"] for number in group["params"]]
    numbers = dict(zip(names, ours))
    bare = {_bare(p): p for p in used}
    if odd := sorted(str(name) for name in numbers.keys() ^ bare.keys()):
        raise CheckpointError(f"the optimizer has other parameters than the checkpoint:{some(odd)}")
    by_number = {numbers[_bare(name)]: own for name, own in state.items() if _bare(name) in numbers}
    return value | {"state": by_number, "param_groups": _regrouped(groups, numbers, here["param_groups"])}


def _regrouped(groups: list[dict[str, Any]], numbers: Mapping[str, int], here: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the saved groups and their parameters into our order, which may differ from torch's."""
    saved = [(group, {numbers[_bare(p)] for p in group["params"]}) for group in groups]
    ordered = []
    for own in here:
        match = next((group for group, members in saved if members == set(own["params"])), None)
        if match is None:
            raise CheckpointError("the optimizer has other groups of parameters than the checkpoint")
        names = {"param_names": own["param_names"]} if "param_names" in own else {}
        ordered.append(match | {"params": list(own["params"])} | names)
    return ordered


def _names(objects: Any) -> dict[int, str]:
    """The names of all parameters of the modules among `objects`, by identity."""
    return {id(p): _bare(name) for obj in objects if isinstance(obj, torch.nn.Module) for name, p in obj.named_parameters()}


def _names_of(optimizer: Any, names: Mapping[int, str]) -> list[str] | None:
    """The names of an optimizer's parameters, if all are known."""
    groups = optimizer.param_groups
    found = [names.get(id(p)) for group in groups for p in group["params"]]
    if all(name is not None for name in found):
        return [str(name) for name in found]
    if all("param_names" in group for group in groups):
        return [_bare(name) for group in groups for name in group["param_names"]]
    return None
