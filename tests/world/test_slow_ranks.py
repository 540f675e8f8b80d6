"""A slow rank of a real job: named with its cause, given fewer samples with exact gradients, or ended."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.long import only_long

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from slow_ranks import job, named, rebalanced

pytestmark = pytest.mark.usefixtures("warm_python")


@only_long
@pytest.mark.parametrize("seed", range(20))
def test_it_is_named_within_20_steps(seed):
    row = named(seed)
    assert row["right"], row
    assert row["after_steps"] <= 20


def test_rebalancing_is_exact():
    row = rebalanced(steps=40)
    assert row["weights_equal"], row
    assert row["error"] < 1e-12  # against one process with the same batches, in float64
    assert row["samples_once"]
    assert row["shares"][3] < min(row["shares"][:3]), row
    assert sum(row["shares"]) == 40


@only_long
def test_nobody_is_named_if_nobody_is_slow():
    assert job("warn", slow=-1, begins=0, steps=2000, per_sample=0.001)[0]["slow"] == []


@only_long
def test_a_slow_rank_is_ended():
    members = job("evict", slow=1, begins=0, steps=40, per_sample=0.001)
    assert sorted(members) == [0, 2, 3]
    assert members[0]["slow"][0]["rank"] == 1
    assert members[0]["rows"][-1]["ranks"] == 3
