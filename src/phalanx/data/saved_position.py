"""The state of a loader: its position as plain data, with the settings that the order of samples depends on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.data.position import Position


def to_state(at: Position, identity: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a loader at this position."""
    return {"seed": at.seed, "epoch": at.epoch, "samples": at.samples, **identity}


def from_state(state: Mapping[str, Any], identity: Mapping[str, Any]) -> Position:
    """Read the position from a state. ValueError if it is not a loader's state, or that loader had another order."""
    if missing := [name for name in to_state(Position(0), identity) if name not in state]:
        raise ValueError(f"this is not the state of a Loader: it has no {', '.join(missing)}")
    for name, mine in identity.items():
        if state[name] != mine:
            raise ValueError(f"the state has {name}={state[name]!r}, this loader has {name}={mine!r}: their orders differ")
    owed = tuple((int(first), int(last)) for first, last in state.get("owed", ()))
    return Position(state["seed"], state["epoch"], state["samples"], owed)
