"""The kernels for low-rank gradients, against the same formulas in float64, for every instruction set that this processor has."""

import pytest
import torch

from phalanx.native import core, low_rank

# every number of rows of Q that share a pass, one more and one less; columns around the width of every vector
RANKS = (1, 2, 3, 4, 5, 7, 8, 9)
COLUMNS = (1, 3, 4, 5, 8, 15, 16, 17, 33, 147)
ROWS = 6


@pytest.fixture(params=["torch", "portable", "avx2", "avx512"])
def kernels(request, monkeypatch):
    """What computes: torch, or the core with these kernels."""
    if request.param == "torch":
        monkeypatch.setattr(core, "is_native", lambda: False)
        yield "torch"
        return
    if not core.is_native():
        pytest.skip("no native core")
    before = core._native.kernels()
    if not core._native.choose_kernels(request.param):
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    core._native.choose_kernels(before)


def some(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rank", RANKS)
def test_advance_and_expand(kernels, rank):
    for columns in COLUMNS:
        x, m = some(ROWS, columns, seed=1), some(ROWS, columns, seed=2)
        p, q = some(ROWS, rank, seed=3), some(rank, columns, seed=4)
        for added in (x, None):
            sums, thin = m.clone(), p.clone()
            low_rank.advance(added, sums, thin, q)
            wanted = m.double() - p.double() @ q.double() + (0 if added is None else x.double())
            assert torch.allclose(sums.double(), wanted, atol=2e-5), (columns, added is None)
            assert torch.allclose(thin.double(), wanted @ q.double().t(), atol=2e-3)
        out = torch.full((ROWS, columns), 7.0)
        low_rank.expand(p, q, out, 3.0)
        assert torch.allclose(out.double(), 3 * p.double() @ q.double(), atol=2e-5)


def test_nothing_beside_the_matrices_is_touched(kernels):
    rows, columns, rank = 3, 19, 5
    whole = torch.full((2 + rows * columns + 2,), 7.0)
    thin = torch.full((2 + rows * rank + 2,), 7.0)
    m, p = whole[2:-2].view(rows, columns), thin[2:-2].view(rows, rank)
    low_rank.advance(some(rows, columns, seed=1), m, p, some(rank, columns, seed=2))
    low_rank.expand(p, some(rank, columns, seed=3), m, 1.0)
    for outside in (whole[:2], whole[-2:], thin[:2], thin[-2:]):
        assert outside.tolist() == [7.0, 7.0]
    assert not bool((whole[2:-2] == 7).any() or (thin[2:-2] == 7).any())


@pytest.mark.skipif(not core.is_native(), reason="no native core")
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_every_processor_expands_to_the_same_bits_with_the_core_and_without(rank, factor, monkeypatch):
    """Each rank computes the mean for itself, so replicas would part."""
    before, found = core._native.kernels(), []

    def expand():
        found.append(torch.empty(ROWS, 147))
        low_rank.expand(some(ROWS, rank, seed=3), some(rank, 147, seed=4), found[-1], factor)

    try:
        for name in ("portable", "avx2", "avx512"):
            if core._native.choose_kernels(name):
                expand()
    finally:
        core._native.choose_kernels(before)
    monkeypatch.setattr(core, "is_native", lambda: False)
    expand()
    assert all(torch.equal(own, found[0]) for own in found)


@pytest.mark.skipif(not core.is_native(), reason="no native core")
@pytest.mark.parametrize("shape", [(2**30, 2**30, 1), (2, 2, 0), (-1, 2, 1), (2, 2**52, 1), (2, 2, 2**40)])
def test_impossible_shapes_are_refused(shape):
    x = torch.ones(64).data_ptr()
    for call in (
        lambda: core._native.advance_matrix(x, x, x, x, *shape),
        lambda: core._native.expand_matrix(x, x, x, *shape, 1.0),
    ):
        with pytest.raises(ValueError, match=r"negative or too large|must be in|a matrix of"):
            call()


@pytest.mark.skipif(not core.is_native(), reason="no native core")
def test_matrices_at_address_zero_are_refused():
    x = torch.ones(64).data_ptr()
    for m, p, q in ((0, x, x), (x, 0, x), (x, x, 0)):
        with pytest.raises(ValueError, match="at address 0"):
            core._native.advance_matrix(x, m, p, q, 2, 2, 1)
        with pytest.raises(ValueError, match="at address 0"):
            core._native.expand_matrix(p, q, m, 2, 2, 1, 1.0)
