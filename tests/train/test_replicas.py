"""Fingerprints tell contents apart, and every version has exactly one owner: the lowest rank that has it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.train.checkpoint.replicas import SMALL, find_owners, fingerprint

SIZES = [0, 1, 7, SMALL - 1, SMALL, SMALL + 1, 3 * SMALL, 3 * SMALL + 5]


@pytest.mark.parametrize("size", SIZES)
def test_every_bit_counts(size):
    x = torch.randint(0, 256, (size,), dtype=torch.uint8)
    before = fingerprint(x)
    assert fingerprint(x.clone()) == before
    for at in sorted({0, size // 3, size // 2, size - 1} & set(range(size))):
        for bit in range(8):
            x[at] ^= 1 << bit
            assert fingerprint(x) != before
            x[at] ^= 1 << bit
    assert fingerprint(x) == before


@pytest.mark.parametrize("distance", [8, SMALL, SMALL + 8])
def test_the_order_counts(distance):
    """Words that change places within a row, within a column, and across both."""
    x = torch.arange(4 * SMALL // 8)
    y, k = x.clone(), distance // 8
    y[5], y[5 + k] = x[5 + k], x[5]
    assert fingerprint(x) != fingerprint(y)


def test_shape_and_dtype_count():
    x = torch.zeros(6)
    assert len({fingerprint(own) for own in [x, x.view(2, 3), x.view(torch.int32), torch.zeros(0), torch.zeros(2, 0)]}) == 5


def test_layout_does_not():
    x = torch.arange(40000.0)
    assert fingerprint(x[3:-3]) == fingerprint(x[3:-3].clone())  # begins in the middle of a word
    assert fingerprint(x.view(200, 200).t()) == fingerprint(x.view(200, 200).t().contiguous())


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_owners(versions):
    deviations = [{} if own == versions[0] else {"x": str(own)} for own in versions]
    owners = find_owners(deviations)
    assert owners == ({} if len(set(versions)) == 1 else {"x": tuple(versions.index(own) for own in versions)})
