"""Whether a core is idle while the ranks of a host compute."""

from __future__ import annotations

import os

import torch


def has_idle_core(ranks: int) -> bool:
    """Whether each of `ranks` ranks on this host has a core for one more thread beside those that compute.

    Ranks may differ in the answer: it must only decide when an operation runs, never in which order.
    """
    return len(os.sched_getaffinity(0)) >= ranks * (torch.get_num_threads() + 1)
