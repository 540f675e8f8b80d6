"""The global generators while a data set of the user's makes its samples: for each sample a function of seed, epoch and index.

A data set may draw from torch's, NumPy's or Python's own generator. All three are seeded before each sample, so that it is the
same in every run, on any number of ranks and in any worker process. Afterwards they are as they were: training draws from them,
too. A stream is seeded when its epoch begins, and has its own generators from then on.

Threads share these generators. So this is for the main thread of a process: the one that trains, which does not train meanwhile,
or that of a worker. Ranks that are threads of one process would seed each other's: there nothing is seeded.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from phalanx.data.draws import Draws

# streams of Draws that seed generators; transforms count theirs from 0
SAMPLES, COLLATING, STREAMS, WORKERS = (((1 << 32) - 1) - use for use in range(4))

States = tuple[torch.Tensor, Any, Any]


def are_ours() -> bool:
    """Whether this thread may seed the generators of the process."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def borrowed() -> Iterator[None]:
    """Whatever is drawn or seeded inside leaves no trace."""
    before = states()
    try:
        yield
    finally:
        put_back(before)


def states() -> States:
    """The states of the three generators."""
    return torch.default_generator.get_state(), numpy.random.get_state(), random.getstate()


def put_back(before: States) -> None:
    """Make them as they were."""
    torch.default_generator.set_state(before[0])
    numpy.random.set_state(before[1])
    random.setstate(before[2])


def seed_all(bits: int) -> None:
    """Seed the three of them with 64 bits. Those of accelerators are left alone: samples are made on the host."""
    torch.default_generator.manual_seed(bits)
    numpy.random.seed(bits >> 32)
    random.seed(bits)


def seed_of_worker(seed: int, rank: int, worker: int) -> int:
    """The seed of a worker process, as torch has it: a base, which is another one on each rank, plus the number of the worker."""
    return int(Draws(seed, 0, numpy.array([rank])).words(WORKERS)[0] >> 2) + worker


def seed_worker(seed: int) -> None:
    """Seed a worker process, before `worker_init_fn`: `torch.initial_seed()` is `seed` there, as in a worker of a DataLoader."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed([seed & 0xFFFFFFFF, seed >> 32])  # of a Mersenne twister, all 64 bits


def word(seed: int, epoch: int, index: int, use: int) -> int:
    """64 bits that seed the generators for one use."""
    return int(Draws(seed, epoch, numpy.array([index])).words(use)[0])
