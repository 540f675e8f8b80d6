"""Phalanx: neural networks trained by very many workers with very large batches, on PyTorch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx import schedule
    from phalanx.comm.communicator import Communicator
    from phalanx.comm.create import create_communicator, run_local
    from phalanx.comm.failure import CommunicationError
    from phalanx.comm.issuer import Pending
    from phalanx.grad.allreduce import AllReduce, ReplicaError
    from phalanx.optim.multi_node import MultiNodeOptimizer, create_multi_node_optimizer
    from phalanx.schedule import Schedule, ScheduleError, halving_doubling, hierarchical, ring, torus, tree

__version__ = "0.1.0"

__all__ = [
    "CommunicationError",
    "Communicator",
    "Pending",
    "Schedule",
    "ScheduleError",
    "create_communicator",
    "halving_doubling",
    "hierarchical",
    "ring",
    "run_local",
    "schedule",
    "torus",
    "tree",
]

# loaded on first use: `phalanx verify` on a laptop must not wait for torch
_HOME = {
    "CommunicationError": "phalanx.comm.failure",
    "Communicator": "phalanx.comm.communicator",
    "Pending": "phalanx.comm.issuer",
    "create_communicator": "phalanx.comm.create",
    "run_local": "phalanx.comm.create",
    "Schedule": "phalanx.schedule",
    "ScheduleError": "phalanx.schedule",
    "halving_doubling": "phalanx.schedule",
    "hierarchical": "phalanx.schedule",
    "ring": "phalanx.schedule",
    "torus": "phalanx.schedule",
    "tree": "phalanx.schedule",
}


def __getattr__(name: str) -> Any:
    if name == "schedule":
        return importlib.import_module("phalanx.schedule")
    if name not in _HOME:
        raise AttributeError(f"module 'phalanx' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
