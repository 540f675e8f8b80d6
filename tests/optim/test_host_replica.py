"""Who updates what, and which tensors and optimizers can be moved."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.optimizer import register_optimizer_step_pre_hook

from phalanx.optim.host_replica import CUT, Part, immovable, objection, parts_of, places_of


@given(st.lists(st.integers(0, 5 * CUT), max_size=6), st.integers(1, 9))
def test_parts_cover_every_element_once(counts, size):
    seen = [[0] * count for count in counts]
    for rank in range(size):
        parts = parts_of(counts, rank, size)
        for part in parts:
            assert part.start % CUT == 0
            assert part.stop % CUT == 0 or part.stop == counts[part.tensor]
            for i in range(part.start, part.stop):
                seen[part.tensor][i] += 1
        assert abs(sum(part.stop - part.start for part in parts) - sum(counts) / size) <= CUT
        assert len({part.tensor for part in parts}) == len(parts)
    assert all(times == 1 for own in seen for times in own)


def test_parts_of_an_example():
    assert parts_of([1000, 10], 0, 2) == (Part(0, 0, 256),)
    assert parts_of([1000, 10], 1, 2) == (Part(0, 256, 1000), Part(1, 0, 10))


@given(st.lists(st.integers(0, 5 * CUT), max_size=9), st.integers(1, 5))
def test_whole_tensors_belong_to_one_rank_each(counts, size):
    parts = [part for rank in range(size) for part in parts_of(counts, rank, size, whole=True)]
    assert sorted(part.tensor for part in parts) == [i for i, count in enumerate(counts) if count]
    assert all((part.start, part.stop) == (0, counts[part.tensor]) for part in parts)
    shares = [sum(part.stop for part in parts_of(counts, rank, size, whole=True)) for rank in range(size)]
    assert max(shares) <= sum(counts) / size + max(counts, default=0) + 1


@given(st.lists(st.one_of(st.none(), st.integers(0, 100)), max_size=6))
def test_places_do_not_overlap(counts):
    tensors = [None if count is None else torch.empty(count) for count in counts]
    places, end = places_of(tensors)
    used = sorted((place, place + x.nbytes) for place, x in zip(places, tensors, strict=True) if x is not None and x.nbytes)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(used))
    assert all(stop <= end and start % 64 == 0 for start, stop in used)


def parameter(*shape):
    return torch.nn.Parameter(torch.zeros(*shape))


def test_what_can_be_moved():
    layer = torch.nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    for x in (
        parameter(3, 4),
        torch.nn.Parameter(torch.tensor(1.0)),
        parameter(0),
        layer.weight,
        torch.zeros(3),
        torch.nn.LSTM(3, 3).weight_ih_l0,
    ):
        assert immovable(x) == ""


class Special(torch.Tensor):
    """Nobody knows what it does in its own memory."""


VIEWED = parameter(3)
VIEW = VIEWED.detach()
TIED = parameter(4)
TIED_TO = torch.nn.Parameter(TIED.data)
ARRAY_OF = parameter(3)
ARRAY = ARRAY_OF.detach().numpy()


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (VIEWED, "view"),
        (TIED, "view"),
        (ARRAY_OF, "view"),
        (parameter(3).share_memory_(), "shared already"),
        (torch.nn.Parameter(torch.zeros(4, 4)[:, ::2].detach()), "gaps"),
        (torch.nn.Parameter(torch.zeros(2, 1).expand(2, 3)), "gaps"),
        (torch.zeros(3).as_subclass(Special), "Special"),
        (torch.zeros(3, device="meta"), "meta"),
        (parameter(2) * 2, "Tensor"),
    ],
)
def test_what_cannot_be_moved(x, words):
    assert words in immovable(x)


def sgd(**options):
    return torch.optim.SGD([parameter(3)], lr=0.1, **options)


class OwnSGD(torch.optim.SGD):
    """Nobody knows what its step does."""

    def step(self, closure=None):
        return super().step(closure)


def replaced():
    optimizer = sgd()
    optimizer.step = lambda: None
    return optimizer


def hooked(kind):
    optimizer = sgd()
    getattr(optimizer, f"register_step_{kind}_hook")(lambda *_: None)
    return optimizer


def scheduled():
    optimizer = sgd(momentum=0.9, maximize=True)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (sgd(momentum=0.9, nesterov=True), ""),
        (scheduled(), ""),
        (torch.optim.Adam([parameter(3)]), "Adam"),
        (OwnSGD([parameter(3)]), "OwnSGD"),
        (sgd(differentiable=True), "differentiable"),
        (replaced(), "replaced"),
        (hooked("pre"), "hooks"),
        (hooked("post"), "hooks"),
    ],
)
def test_which_steps_can_be_divided(optimizer, words):
    assert words in objection(optimizer)
    assert bool(words) == bool(objection(optimizer))


def test_a_hook_on_all_optimizers_counts():
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        assert "hooks" in objection(sgd())
    finally:
        handle.remove()
    assert objection(sgd()) == ""
