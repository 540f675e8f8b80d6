"""What the next step needs of the ones before it, for a checkpoint that continues bit for bit."""

from __future__ import annotations

from typing import Any

from phalanx.grad.double_buffer import Previous
from phalanx.grad.exchange import Exchange
from phalanx.grad.trained import Trained
from phalanx.grad.weights import Weights


class Unfinished:
    """The means of double buffering that are under way, if it is `delayed`, and the last sum of weights."""

    def __init__(self, exchange: Exchange, previous: Previous, trained: Trained, weights: Weights, *, delayed: bool) -> None:
        self._exchange, self._previous, self._trained, self._weights = exchange, previous, trained, weights
        self._delayed = delayed

    def state_dict(self) -> dict[str, Any]:
        """Waits for what is under way."""
        means = self._previous.means(self._exchange.groups, self._trained.names) if self._delayed else {}
        return {"means": means, "usual": self._weights.usual}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state; on any number of ranks, because what is saved are means."""
        self._previous.restored = {name: x.clone() for name, x in state["means"].items()} if self._delayed else {}
        self._weights.usual = state["usual"]
