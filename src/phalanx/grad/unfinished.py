"""What the next step needs from earlier steps, for a checkpoint that continues bit for bit.

Wires that round keep what they rounded away, on each rank its own. In a world of another size these errors belong to no rank, so
they are dropped, and the first step there is rounded like the first step of a run.
"""

from __future__ import annotations

from typing import Any

from phalanx.grad.double_buffer import Previous
from phalanx.grad.exchange import Exchange
from phalanx.grad.trained import Trained
from phalanx.grad.weights import Weights


class Unfinished:
    """The means of double buffering that are in flight, if it is `delayed`, the last sum of weights, and what wires keep."""

    def __init__(self, exchange: Exchange, previous: Previous, trained: Trained, weights: Weights, *, delayed: bool) -> None:
        self._exchange, self._previous, self._trained, self._weights = exchange, previous, trained, weights
        self._delayed = delayed

    def state_dict(self) -> dict[str, Any]:
        """Waits for what is in flight."""
        means = self._previous.means(self._exchange.groups, self._trained.names) if self._delayed else {}
        return {"means": means, "usual": self._weights.usual, "wires": self._trained.kept_by_wires()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state; `resized` makes one for another number of ranks."""
        self._previous.restored = {name: x.clone() for name, x in state["means"].items()} if self._delayed else {}
        self._weights.usual = state["usual"]
        self._trained.give_to_wires(state.get("wires", {}))

    def resized(self, state: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
        """Convert a state that another number of ranks saved, by dropping the errors of single ranks."""
        kept = {name: {part: x for part, x in own.items() if part != "error"} for name, own in state.get("wires", {}).items()}
        return state | {"wires": kept}


class NothingElse:
    """For an optimizer whose `state_dict` has everything."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load."""
