"""The arena: where every gradient lies, and how a fresh one gets there."""

import itertools

import pytest
import torch

from phalanx.grad.arena import FLAGS, Arena
from phalanx.grad.groups import even


def allocate(numel, dtype, device):
    return torch.full((numel,), float("nan"), dtype=dtype, device=device)  # as bad as uninitialised memory can be


SHAPES = [(3,), (), (0,), (4, 5), (2, 3, 4, 5), (7,), (1, 0, 3), (33,)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("multiple", [1, 2, 3, 5, 8, 24, 1000])
@pytest.mark.parametrize("limit", [1, 100, 10**6])
def test_groups_are_aligned_padded_disjoint_and_zero(dtype, multiple, limit):
    params = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in SHAPES]
    runs = even([p.nbytes for p in params], limit)
    arena = Arena(params, runs, multiple=multiple, allocate=allocate)
    assert torch.equal(arena.flat, torch.zeros_like(arena.flat))
    assert len(arena.groups) == len(runs)
    for i, p in enumerate(params):
        view = arena.views[p]
        assert (view.shape, view.dtype) == (p.shape, p.dtype)
        view.fill_(i + 1)
    for run, group in zip(runs, arena.groups):
        assert group.numel() % multiple == 0
        assert (group.storage_offset() * group.element_size()) % 64 == 0
        mine = {float(i + 1) for i in run if params[i].numel()}
        assert set(group.abs().float().tolist()) - {0.0} == mine  # its own gradients, and nobody else's
    for a, b in itertools.pairwise(arena.groups):
        assert a.storage_offset() + a.numel() <= b.storage_offset()
    assert sum(int((group == i + 1).sum()) for group in arena.groups for i in range(len(params))) == sum(
        p.numel() for p in params
    )
    assert not arena.groups[-1][-FLAGS:].any()  # elements that are no gradients, also where all others are full


def test_take_brings_every_kind_of_gradient_home():
    p = torch.nn.Parameter(torch.zeros(2, 3))
    arena = Arena([p], [range(1)], multiple=1, allocate=allocate)
    view = arena.views[p]

    def took(grad, wanted):
        p.grad = grad
        arena.take(p)
        assert p.grad.data_ptr() == view.data_ptr()
        assert torch.equal(p.grad, wanted)
        assert torch.equal(view, wanted)
        assert torch.equal(arena.flat[: p.numel()].view(2, 3), wanted)

    x = torch.arange(6.0).view(2, 3)
    took(x.clone(), x)
    took(view, x)
    took(view.detach(), x)
    took(x.t().contiguous().t(), x)
    took(x[:, :1].expand(2, 3), x[:, :1].expand(2, 3))
    took(x.to_sparse(), x)
    took(None, torch.zeros(2, 3))


def test_take_leaves_a_graph_to_its_owner():
    p = torch.nn.Parameter(torch.ones(3))
    arena = Arena([p], [range(1)], multiple=1, allocate=allocate)
    p.grad = p * 2
    arena.take(p)
    assert p.grad.requires_grad
    assert torch.equal(arena.views[p], torch.full((3,), 2.0))


def test_an_alias_that_the_user_sends_elsewhere_is_brought_back():
    p = torch.nn.Parameter(torch.ones(2, 2))
    arena = Arena([p], [range(1)], multiple=1, allocate=allocate)
    p.grad = torch.ones(2, 2)
    arena.take(p)
    for move in (torch.clone, torch.t, lambda g: g * 3):
        p.grad.data = move(p.grad.data)
        wanted = p.grad.clone()
        arena.take(p)
        assert arena.has(p, p.grad)
        assert torch.equal(arena.views[p], wanted)


def test_only_the_users_writes_count_in_the_version_of_an_alias():
    p = torch.nn.Parameter(torch.ones(3))
    arena = Arena([p], [range(1)], multiple=1, allocate=allocate)
    arena.take(p)
    before = p.grad._version
    arena.flat.add_(1)
    arena.groups[0].mul_(2)
    arena.views[p].sub_(1)
    assert p.grad._version == before
    assert torch.equal(p.grad, torch.ones(3))
    p.grad.mul_(5)
    assert p.grad._version == before + 1


def test_a_frozen_parameter_counts_as_zeros_and_keeps_what_it_has():
    p, q = (torch.nn.Parameter(torch.ones(3)) for _ in "pq")
    arena = Arena([p, q], [range(2)], multiple=1, allocate=allocate)
    p.grad, q.grad = torch.ones(3), torch.ones(3)
    p.requires_grad_(False)
    mine = p.grad
    arena.take_all([p, q])
    assert p.grad is mine
    assert torch.equal(arena.views[p], torch.zeros(3))
    assert torch.equal(arena.views[q], torch.ones(3))


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
        torch.randn(5, 4).t(),
        torch.randn(4, 3, 2).permute(2, 0, 1),
    ],
)
def test_dense_layouts_are_kept(x):
    p = torch.nn.Parameter(x)
    first = torch.nn.Parameter(torch.ones(3))
    arena = Arena([first, p], [range(2)], multiple=1, allocate=allocate)
    assert arena.views[p].stride() == p.stride()
    p.grad = torch.randn_like(p)
    wanted = p.grad.clone()
    arena.take(p)
    assert torch.equal(p.grad, wanted)
    assert torch.equal(arena.views[first], torch.zeros(3))


def test_layouts_with_gaps_become_contiguous():
    for x in (torch.randn(4, 6)[:, ::2], torch.randn(3, 1).expand(3, 4)):
        p = torch.nn.Parameter(x)
        arena = Arena([p], [range(1)], multiple=1, allocate=allocate)
        assert arena.views[p].is_contiguous()
