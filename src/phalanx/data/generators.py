"""Seed the global random generators for each sample of a user's data set, from seed, epoch and index.

A data set may draw from torch's, NumPy's or Python's own generator. All three are seeded before each sample, so that a sample is
the same in every run, on any number of ranks and in any worker process. Afterwards their states are restored, because training
draws from them, too. A stream is seeded when its epoch begins, and keeps its own generator states from then on.

Threads share these generators. So this is only for the main thread of a process: the one that trains, which is not training at
that time, or that of a worker. Ranks that are threads would seed each other's generators, so nothing is seeded there.
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

# streams of Draws that seed generators; those of transforms count from 0
SAMPLES, COLLATING, STREAMS, WORKERS = (((1 << 32) - 1) - use for use in range(4))

States = tuple[torch.Tensor, Any, Any]


def are_ours() -> bool:
    """Whether this thread may seed the generators of the process."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def borrowed() -> Iterator[None]:
    """Restore the generators afterwards."""
    before = states()
    try:
        yield
    finally:
        put_back(before)


def states() -> States:
    """The states of the three generators."""
    return torch.default_generator.get_state(), numpy.random.get_state(), random.getstate()


def put_back(before: States) -> None:
    """Restore the states."""
    torch.default_generator.set_state(before[0])
    numpy.random.set_state(before[1])
    random.setstate(before[2])


def seed_all(bits: int) -> None:
    """Seed all three with 64 bits. Accelerator generators are left alone: samples are made on the host."""
    torch.default_generator.manual_seed(bits)
    numpy.random.seed(bits >> 32)
    random.seed(bits)


def seed_of_worker(seed: int, rank: int, worker: int) -> int:
    """The seed of a worker process, as in torch: a base, which differs between ranks, plus the worker's number."""
    return int(Draws(seed, 0, numpy.array([rank])).words(WORKERS)[0] >> 2) + worker


def seed_worker(seed: int) -> None:
    """Seed a worker process before `worker_init_fn`, where `torch.initial_seed()` is `seed`, as with a DataLoader."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed([seed & 0xFFFFFFFF, seed >> 32])  # of a Mersenne twister, all 64 bits


def word(seed: int, epoch: int, index: int, use: int) -> int:
    """64 bits that seed the generators for one use."""
    return int(Draws(seed, epoch, numpy.array([index])).words(use)[0])
