"""Names of torch that begin with an underscore. All of ours are here, so that a new version of torch has one file to break."""

from __future__ import annotations

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks  # torch 2.0 to 2.15


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether something is registered to run before or after `optimizer.step()`."""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)
