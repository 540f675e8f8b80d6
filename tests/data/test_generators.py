"""Data sets that draw from global generators: the same samples in every run, and training draws as if nobody else did."""

import contextlib
import random
import time

import numpy
import pytest
import torch
from tests.data.stand_ins import Drawing, World

import phalanx
from phalanx.data import Loader, SampleError


def draw():
    return torch.rand(()).item(), float(numpy.random.rand()), random.random()


def two_epochs(dataset, rank=0, size=1, *, think=0.0, **options):
    """The samples by (epoch, index), and what training drew meanwhile; it takes `think` seconds per step."""
    phalanx.seed_everything(5)
    samples, drawn = {}, []
    with Loader(dataset, World(rank, size), batch=12, seed=3, **options) as loader:
        for epoch in range(2):
            for x, y in loader:
                time.sleep(think)
                drawn.append(draw())
                samples |= {(epoch, int(i)): row.tolist() for i, row in zip(y, x, strict=True)}
    return samples, drawn


def test_two_runs_are_equal_whatever_takes_how_long_and_training_is_not_disturbed():
    samples, drawn = two_epochs(Drawing(36))
    assert two_epochs(Drawing(36, pause=0.001), think=0.003) == (samples, drawn)
    phalanx.seed_everything(5)
    assert [draw() for _ in drawn] == drawn
    assert samples[0, 0] != samples[1, 0]  # another epoch, other numbers
    assert len({tuple(row[1:]) for row in samples.values()}) == 72  # and so for every sample
    assert two_epochs(Drawing(36), prefetch=5)[0] == samples


@pytest.mark.usefixtures("warm_python")
def test_processes_and_ranks_change_nothing():
    samples, drawn = two_epochs(Drawing(36))
    assert two_epochs(Drawing(36), workers=2, kind="process") == (samples, drawn)
    ranks = [two_epochs(Drawing(36), rank, 3)[0] for rank in range(3)]
    assert ranks[0] | ranks[1] | ranks[2] == samples


def test_another_seed_draws_other_numbers():
    rows = [next(iter(Loader(Drawing(4), batch=4, seed=seed, shuffle=False)))[0].tolist() for seed in (1, 2, 1)]
    assert rows[0] == rows[2] != rows[1]


def test_generators_are_put_back_when_a_sample_fails():
    phalanx.seed_everything(5)
    wanted = draw()
    for dataset in (Drawing(12), _Failing(12)):
        phalanx.seed_everything(5)
        with contextlib.suppress(SampleError):
            list(Loader(dataset, batch=6))
        assert draw() == wanted


class _Failing(Drawing):
    def __getitem__(self, i):
        super().__getitem__(i)
        raise KeyError("no such key in the user's code")


def test_threads_that_are_asked_for_leave_the_generators_alone():
    """They share them with training, which must not be seeded anew under its feet."""
    phalanx.seed_everything(5)
    before = torch.default_generator.initial_seed()
    with Loader(Drawing(24), batch=12, workers=1) as loader:
        list(loader)
    assert torch.default_generator.initial_seed() == before


def test_ranks_that_are_threads_do_not_seed_each_other():
    """One may still be drawing the weights of its model while another reads its first batch."""
    before = torch.default_generator.initial_seed()

    def read(comm):
        with Loader(Drawing(24), comm, batch=12) as loader:
            for _ in loader:
                assert torch.default_generator.initial_seed() == before

    phalanx.run_local(2, read)
    assert torch.default_generator.initial_seed() == before
