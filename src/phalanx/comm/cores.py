"""Tells whether a core is idle while the ranks of a host compute."""

from __future__ import annotations

import os

import torch


def has_idle_core(ranks: int) -> bool:
    """Whether each of `ranks` ranks on this host has a core for one more thread besides those that compute.

    Ranks may get different answers, so use it only to decide when an operation runs, never in which order.
    """
    return len(os.sched_getaffinity(0)) >= ranks * (torch.get_num_threads() + 1)
