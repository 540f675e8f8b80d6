"""The global generators while a data set of the user's makes its samples: for each sample a function of seed, epoch and index.

A data set may draw from torch's, NumPy's or Python's own generator. All three are seeded before each sample, so that it is the
same in every run, on any number of ranks and in any worker process. Afterwards they are as they were: training draws from them,
too.

Threads share these generators. So this is for the main thread of a process: the one that trains, which does not train meanwhile,
or that of a worker. Ranks that are threads of one process would seed each other's: there nothing is seeded.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch


def are_ours() -> bool:
    """Whether this thread may seed the generators of the process."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def borrowed() -> Iterator[None]:
    """Whatever is drawn or seeded inside leaves no trace."""
    states = torch.default_generator.get_state(), numpy.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        numpy.random.set_state(states[1])
        random.setstate(states[2])


def seed_all(bits: int) -> None:
    """Seed the three of them with 64 bits. Those of accelerators are left alone: samples are made on the host."""
    torch.default_generator.manual_seed(bits)
    numpy.random.seed(bits >> 32)
    random.seed(bits)
