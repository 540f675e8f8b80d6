"""Collective algorithms as values: write one, lower it, verify it, look at it."""

from .broadcast import binomial, scatter_gather
from .compose import chain, relabel
from .gossip import Topology, gossip, gossip_partners, gossip_period, gossip_weights
from .halving_doubling import halving_doubling
from .hierarchical import hierarchical
from .jsonform import from_json, to_json
from .lower import lower
from .msccl_export import to_msccl
from .msccl_import import from_msccl
from .mscclpp_export import to_mscclpp
from .mscclpp_import import from_mscclpp
from .ops import Chunks, Collective, Goal, Kind, Move, Op, Recode, Scale, Schedule, ScheduleError, Step
from .quantised import quantised
from .recursive_doubling import recursive_doubling
from .ring import ring
from .show import show, trace
from .swing import swing
from .text import from_text, to_text
from .torus import torus
from .traffic import latency_steps, lowered_ops, sent
from .tree import tree
from .verify import verify
from .viewer import to_html

__all__ = [
    "Chunks",
    "Collective",
    "Goal",
    "Kind",
    "Move",
    "Op",
    "Recode",
    "Scale",
    "Schedule",
    "ScheduleError",
    "Step",
    "Topology",
    "binomial",
    "chain",
    "from_json",
    "from_msccl",
    "from_mscclpp",
    "from_text",
    "gossip",
    "gossip_partners",
    "gossip_period",
    "gossip_weights",
    "halving_doubling",
    "hierarchical",
    "latency_steps",
    "lower",
    "lowered_ops",
    "quantised",
    "recursive_doubling",
    "relabel",
    "ring",
    "scatter_gather",
    "sent",
    "show",
    "swing",
    "to_html",
    "to_json",
    "to_msccl",
    "to_mscclpp",
    "to_text",
    "torus",
    "trace",
    "tree",
    "verify",
]
