"""What makes a replica, beside statistics: parameters, and the tensors of their optimizer's state."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.grad.gossip.packet import real


def replica(
    optimizer: torch.optim.Optimizer, trained: Sequence[torch.nn.Parameter]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Parameters, and of the optimizer's state every floating-point tensor that is shaped like its parameter: all that mixes."""
    state = [
        value
        for p, value in _state(optimizer, trained)
        if value.shape == p.shape and (value.is_floating_point() or value.is_complex())
    ]
    return [real(p.detach()) for p in trained], [real(value) for value in state]


def whole_replica(optimizer: torch.optim.Optimizer, trained: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Parameters, and every tensor of the optimizer's state: all that a rank which was left behind takes over."""
    return [*(real(p.detach()) for p in trained), *(real(value) for _, value in _state(optimizer, trained))]


def _state(
    optimizer: torch.optim.Optimizer, trained: Sequence[torch.nn.Parameter]
) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
    return [
        (p, value) for p in trained for _, value in sorted(optimizer.state.get(p, {}).items()) if isinstance(value, torch.Tensor)
    ]
