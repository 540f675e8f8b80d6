"""Where torch's C++ side would notice that the GPUs of a simulation are memory of the CPU. `bridge(monkeypatch)` hides it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.simulated_cuda.tensor import CudaTensor
from torch.utils._device import _device_constructors

from phalanx.train.checkpoint import tree


def bridge(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For a fixture: `yield from bridge(monkeypatch)`."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: torch.cuda.is_available())  # whether to pin
    monkeypatch.setattr(tree, "DENSE", (torch.Tensor, CudaTensor))  # whether a tensor has its own memory
    yield
    _device_constructors.cache_clear()  # of `with torch.device("meta")`: it remembers torch.empty as it was in a simulation
