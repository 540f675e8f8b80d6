"""Phalanx: neural networks trained by very many workers with very large batches, on PyTorch."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx import data, schedule
    from phalanx.comm.communicator import Communicator
    from phalanx.comm.create import create_communicator, run_local
    from phalanx.comm.ddp import ddp_hook
    from phalanx.comm.failure import CommunicationError
    from phalanx.comm.pending import Pending
    from phalanx.data.batch import BatchPlan, Stage
    from phalanx.data.scatter import scatter_dataset, scatter_index
    from phalanx.grad.allreduce import AllReduce
    from phalanx.grad.gossip import Gossip
    from phalanx.grad.local import DiLoCo, LocalSGD
    from phalanx.grad.replicas import ReplicaError
    from phalanx.grad.wires import Int8, PowerSGD
    from phalanx.nn import models
    from phalanx.nn.batchnorm import MultiNodeBatchNorm, average_batchnorm_, convert_batchnorm
    from phalanx.nn.init import bcast_parameters, init_parameters_, seed_everything
    from phalanx.nn.loss import LabelSmoothingLoss
    from phalanx.optim import lr
    from phalanx.optim.create import create_multi_node_optimizer
    from phalanx.optim.lars import Lars
    from phalanx.schedule import Schedule, ScheduleError, halving_doubling, hierarchical, ring, torus, tree
    from phalanx.train.checkpoint import Checkpointer
    from phalanx.train.evaluate import create_multi_node_evaluator

__version__ = "0.1.0"

__all__ = [
    "AllReduce",
    "BatchPlan",
    "Checkpointer",
    "CommunicationError",
    "Communicator",
    "DiLoCo",
    "Gossip",
    "Int8",
    "LabelSmoothingLoss",
    "Lars",
    "LocalSGD",
    "MultiNodeBatchNorm",
    "Pending",
    "PowerSGD",
    "ReplicaError",
    "Schedule",
    "ScheduleError",
    "Stage",
    "average_batchnorm_",
    "bcast_parameters",
    "convert_batchnorm",
    "create_communicator",
    "create_multi_node_evaluator",
    "create_multi_node_optimizer",
    "data",
    "ddp_hook",
    "halving_doubling",
    "hierarchical",
    "init_parameters_",
    "lr",
    "models",
    "ring",
    "run_local",
    "scatter_dataset",
    "scatter_index",
    "schedule",
    "seed_everything",
    "torus",
    "tree",
]

# loaded on first use: `phalanx verify` on a laptop must not wait for torch
_HOME = {
    "AllReduce": "phalanx.grad.allreduce",
    "BatchPlan": "phalanx.data.batch",
    "Checkpointer": "phalanx.train.checkpoint",
    "CommunicationError": "phalanx.comm.failure",
    "Communicator": "phalanx.comm.communicator",
    "DiLoCo": "phalanx.grad.local",
    "Gossip": "phalanx.grad.gossip",
    "Int8": "phalanx.grad.wires",
    "LabelSmoothingLoss": "phalanx.nn.loss",
    "Lars": "phalanx.optim.lars",
    "LocalSGD": "phalanx.grad.local",
    "MultiNodeBatchNorm": "phalanx.nn.batchnorm",
    "Pending": "phalanx.comm.pending",
    "PowerSGD": "phalanx.grad.wires",
    "ReplicaError": "phalanx.grad.replicas",
    "Stage": "phalanx.data.batch",
    "average_batchnorm_": "phalanx.nn.batchnorm",
    "bcast_parameters": "phalanx.nn.init",
    "convert_batchnorm": "phalanx.nn.batchnorm",
    "create_communicator": "phalanx.comm.create",
    "create_multi_node_evaluator": "phalanx.train.evaluate",
    "create_multi_node_optimizer": "phalanx.optim.create",
    "ddp_hook": "phalanx.comm.ddp",
    "init_parameters_": "phalanx.nn.init",
    "run_local": "phalanx.comm.create",
    "scatter_dataset": "phalanx.data.scatter",
    "scatter_index": "phalanx.data.scatter",
    "seed_everything": "phalanx.nn.init",
} | dict.fromkeys(
    ["Schedule", "ScheduleError", "halving_doubling", "hierarchical", "ring", "torus", "tree"],
    "phalanx.schedule",
)
_MODULES = {
    "cluster": "phalanx.cluster",
    "data": "phalanx.data",
    "lr": "phalanx.optim.lr",
    "models": "phalanx.nn.models",
    "schedule": "phalanx.schedule",
}


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


# `import torch` registers the backend where Phalanx is installed; this is for a source tree on PYTHONPATH
if "torch" in sys.modules:
    from phalanx.backend.registration import register as _register

    _register()
