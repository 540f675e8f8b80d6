"""A model of clusters: how long a schedule, and a whole training step, would take on a cluster you don't have."""

from .machine import GB, GBIT, Cluster, ClusterError, Link, Uplink, uniform
from .presets import PRESETS
from .profile import GLOO, NCCL, NCCL_WITHOUT_TREES, PLAIN, PROFILES, SHARED_MEMORY, BackendProfile
from .program import Program, compile_schedule
from .simulate import Timeline, run, simulate
from .step import PredictedStep, StepPlan, make_groups, predict_step
from .workload import MODELS, Compute, Model, from_one, from_two

__all__ = [
    "GB",
    "GBIT",
    "GLOO",
    "MODELS",
    "NCCL",
    "NCCL_WITHOUT_TREES",
    "PLAIN",
    "PRESETS",
    "PROFILES",
    "SHARED_MEMORY",
    "BackendProfile",
    "Cluster",
    "ClusterError",
    "Compute",
    "Link",
    "Model",
    "PredictedStep",
    "Program",
    "StepPlan",
    "Timeline",
    "Uplink",
    "compile_schedule",
    "from_one",
    "from_two",
    "make_groups",
    "predict_step",
    "run",
    "simulate",
    "uniform",
]
