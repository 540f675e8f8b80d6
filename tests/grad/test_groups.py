"""even and growing: runs that cover all tensors in order, within their limits."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import phalanx
from phalanx.grad import layout
from phalanx.grad.groups import even, growing
from phalanx.grad.measure import encoded_bucket


def covers(groups, count):
    return [i for group in groups for i in group] == list(range(count)) and all(len(group) for group in groups)


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 120))
def test_even_groups_cover_all_in_order_are_full_and_not_too_full(sizes, limit):
    groups = even(sizes, limit)
    assert covers(groups, len(sizes))
    for group in groups:
        assert len(group) == 1 or sum(sizes[i] for i in group) <= limit
    for group, following in itertools.pairwise(groups):  # the next tensor would not have fitted
        assert sum(sizes[i] for i in group) + sizes[following[0]] > limit


def test_even_by_example():
    assert even([], 10) == ()
    assert even([4, 4, 4, 4], 8) == (range(2), range(2, 4))
    assert even([100, 1, 1], 8) == (range(1), range(1, 3))
    assert even([1, 100, 1], 8) == (range(1), range(1, 2), range(2, 3))
    assert even([0, 0, 0], 1) == (range(3),)


@given(st.integers(0, 500), st.integers(1, 20))
def test_growing_groups_end_at_first_times_k_cubed(count, first):
    groups = growing(count, first)
    assert covers(groups, count)
    for k, group in enumerate(groups, 1):
        assert group.stop == min(count, first * k**3)


def test_resnet_50_has_the_groups_of_the_paper():
    assert [len(group) for group in growing(161, 3)] == [3, 21, 57, 80]


@pytest.mark.parametrize("first", [0, -1])
def test_the_first_group_is_not_empty(first):
    with pytest.raises(ValueError, match="at least 1"):
        growing(10, first)


@pytest.mark.parametrize(
    ("measured", "nbytes", "wanted"),
    [
        (8 << 20, 94 << 20, 32 << 20),  # as many bytes on the wire
        (17 << 20, 94 << 20, 47 << 20),  # one of two groups leaves during backward
        (32 << 20, 1 << 30, 64 << 20),
        (32 << 20, 33 << 20, 32 << 20),  # never less than was measured
        (1 << 20, (1 << 20) + 1, 1 << 20),
        (1 << 20, 3 * (1 << 20) + 1, (3 * (1 << 20) + 2) // 2),
    ],
)
def test_groups_of_encoded_gradients_are_larger(measured, nbytes, wanted):
    assert encoded_bucket(measured, nbytes) == wanted


def test_frozen_parameters_do_not_make_groups_larger(monkeypatch):
    """Three tensors of 4 MiB are sent, in groups of half of their bytes at most."""
    monkeypatch.setattr(layout, "measure_bucket", lambda comm, device: 4 << 20)

    def run(comm, frozen):
        params = [torch.nn.Parameter(torch.zeros(1 << 20)) for _ in range(3)]
        frozen = [torch.nn.Parameter(torch.zeros(4 << 20), requires_grad=False) for _ in range(frozen)]
        every = [*params, *frozen]
        names = [str(i) for i in range(len(every))]
        options = {"wire": phalanx.Int8(), "bucket_bytes": None, "delayed": False}
        groups = layout.agree_on_groups(every, names, {}, comm, phalanx.AllReduce(), **options)
        return [len(group.params) for group in groups]

    assert phalanx.run_local(2, lambda comm: (run(comm, 0), run(comm, 3)), hosts=2) == [([1, 1, 1], [1, 1, 1])] * 2
