"""The tensors of a replica, without statistics: parameters, and the tensors of their optimizer's state."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.grad.gossip.packet import real


def replica(
    optimizer: torch.optim.Optimizer, trained: Sequence[torch.nn.Parameter]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """All that is mixed: parameters, and every floating-point tensor of the optimizer's state that has its parameter's shape."""
    state = [
        value
        for p, value in _state(optimizer, trained)
        if value.shape == p.shape and (value.is_floating_point() or value.is_complex())
    ]
    return [real(p.detach()) for p in trained], [real(value) for value in state]


def whole_replica(optimizer: torch.optim.Optimizer, trained: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    """All that a rank takes over after it was left behind: parameters, and every tensor of the optimizer's state."""
    return [*(real(p.detach()) for p in trained), *(real(value) for _, value in _state(optimizer, trained))]


def _state(
    optimizer: torch.optim.Optimizer, trained: Sequence[torch.nn.Parameter]
) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
    return [
        (p, value) for p in trained for _, value in sorted(optimizer.state.get(p, {}).items()) if isinstance(value, torch.Tensor)
    ]
