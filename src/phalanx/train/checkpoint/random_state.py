"""The random generators of a rank as state: Python's, NumPy's and torch's, so that a resumed run draws the same numbers."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy
import torch


class RandomState:
    """The global generators of this process, and of its current GPU; `save(step, rng=RandomState(), ...)`."""

    def state_dict(self) -> dict[str, Any]:
        state = {"python": random.getstate(), "numpy": numpy.random.get_state(legacy=False), "torch": torch.get_rng_state()}
        return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        try:
            random.setstate(state["python"])
            numpy.random.set_state(state["numpy"])
            torch.set_rng_state(state["torch"])
            if "cuda" in state and torch.cuda.is_available():
                torch.cuda.set_rng_state(state["cuda"])
        except (LookupError, AttributeError, TypeError, OverflowError, RuntimeError) as error:
            raise ValueError(f"not the state of random generators: {error}") from None

    @staticmethod
    def resized(state: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
        """The state for `rank` of `size` after the world size changed: its own stream, derived from `state`."""
        if not isinstance(state, dict) or not isinstance(state.get("torch"), torch.Tensor) or "python" not in state:
            raise ValueError("not the state of random generators")
        seen = hashlib.sha256(state["torch"].numpy().tobytes())
        seen.update(repr((state["python"], rank, size)).encode())
        seed = int.from_bytes(seen.digest()[:4], "little")  # NumPy takes 32 bits
        derived: dict[str, Any] = {
            "python": random.Random(seed).getstate(),
            "numpy": numpy.random.RandomState(seed).get_state(legacy=False),
            "torch": torch.Generator().manual_seed(seed).get_state(),
        }
        if torch.cuda.is_available():
            derived["cuda"] = torch.Generator("cuda").manual_seed(seed).get_state()
        return derived
