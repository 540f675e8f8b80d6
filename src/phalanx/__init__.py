"""Phalanx: neural networks trained by very many workers with very large batches, on PyTorch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx import schedule
    from phalanx.comm.communicator import Communicator
    from phalanx.comm.create import create_communicator, run_local
    from phalanx.comm.ddp import ddp_hook
    from phalanx.comm.failure import CommunicationError
    from phalanx.comm.issuer import Pending
    from phalanx.grad.allreduce import AllReduce, ReplicaError
    from phalanx.nn import models
    from phalanx.nn.init import bcast_parameters, seed_everything
    from phalanx.optim.multi_node import create_multi_node_optimizer
    from phalanx.schedule import Schedule, ScheduleError, halving_doubling, hierarchical, ring, torus, tree

__version__ = "0.1.0"

__all__ = [
    "AllReduce",
    "CommunicationError",
    "Communicator",
    "Pending",
    "ReplicaError",
    "Schedule",
    "ScheduleError",
    "bcast_parameters",
    "create_communicator",
    "create_multi_node_optimizer",
    "ddp_hook",
    "halving_doubling",
    "hierarchical",
    "models",
    "ring",
    "run_local",
    "schedule",
    "seed_everything",
    "torus",
    "tree",
]

# loaded on first use: `phalanx verify` on a laptop must not wait for torch
_HOME = {
    "AllReduce": "phalanx.grad.allreduce",
    "CommunicationError": "phalanx.comm.failure",
    "Communicator": "phalanx.comm.communicator",
    "Pending": "phalanx.comm.issuer",
    "ReplicaError": "phalanx.grad.allreduce",
    "bcast_parameters": "phalanx.nn.init",
    "create_communicator": "phalanx.comm.create",
    "create_multi_node_optimizer": "phalanx.optim.multi_node",
    "ddp_hook": "phalanx.comm.ddp",
    "run_local": "phalanx.comm.create",
    "seed_everything": "phalanx.nn.init",
} | dict.fromkeys(
    ["Schedule", "ScheduleError", "halving_doubling", "hierarchical", "ring", "torus", "tree"],
    "phalanx.schedule",
)
_MODULES = {"models": "phalanx.nn.models", "schedule": "phalanx.schedule"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = importlib.import_module(_MODULES[name])
    elif name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module 'phalanx' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
