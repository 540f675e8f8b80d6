"""Numbers that cannot be an address, a count or a size are a ValueError, and not a write to foreign memory."""

import math

import pytest
import torch

from phalanx.native import core

pytestmark = pytest.mark.skipif(bool(core.UNAVAILABLE), reason=core.UNAVAILABLE or "available")

HUGE = (-1, -(2**63), 2**52, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**400)
F32, SUM = 0, 0


@pytest.fixture(params=[1, 2], ids=["one-rank", "two-ranks"])
def team(request):
    made = core._native.Team(0, request.param, None, 0, 1.0)
    other = core._native.Team(1, 2, made.place, 0, 1.0) if request.param == 2 else None
    made.meet()
    yield made
    made.leave()
    if other is not None:
        other.leave()


@pytest.mark.parametrize("count", HUGE)
def test_counts(team, count):
    x = torch.ones(4).data_ptr()
    calls = {
        "all_reduce": lambda: team.all_reduce(x, count, F32, SUM, 1.0),
        "reduce_scatter": lambda: team.reduce_scatter(x, count, F32, SUM, 0.5),
        "all_gather": lambda: team.all_gather(x, count, F32),
        "broadcast": lambda: team.broadcast(x, count, F32, 0),
        "allocate": lambda: team.allocate(count, 0),
        "allocate one for all": lambda: team.allocate(count, 1),
        "update": lambda: team.update(x, x, x, 0, 0, x, count, 1.0),
        "update_adam": lambda: team.update_adam(x, x, x, x, x, count, 1.0),
        "release": lambda: team.release(count),
        "lars_step": lambda: core._native.lars_step(x, x, count),
    }
    for call in calls.values():
        with pytest.raises(ValueError, match=r"negative or too large|must be in"):
            call()


@pytest.mark.parametrize("address", [0, -8, 2**63, 2**64 - 8, 2**64, 2**400])
def test_addresses(team, address):
    x = torch.ones(10).data_ptr()
    for call in (
        lambda: team.all_reduce(address, 4, F32, SUM, 1.0),
        lambda: team.all_gather(address, 4, F32),
        lambda: team.broadcast(address, 4, F32, 0),
        lambda: team.update(x, x, x, 0, 0, address, 1, 1.0),
        lambda: team.update_adam(x, x, x, x, address, 1, 1.0),
        lambda: core._native.lars_step(address, x, 1),
        lambda: core._native.lars_step(x, address, 1),
    ):
        with pytest.raises(ValueError, match=r"negative or too large|must be in|at address 0"):
            call()


@pytest.mark.parametrize("number", [-1, 99, 2**31, 2**63, 2**64, 2**400])
def test_kinds_ops_roots_and_ranks(team, number):
    x = torch.ones(4).data_ptr()
    for call in (
        lambda: team.all_reduce(x, 4, number, SUM, 1.0),
        lambda: team.all_reduce(x, 4, F32, number, 1.0),
        lambda: team.broadcast(x, 4, F32, number),
        lambda: team.allocate(4, number),
        lambda: core._native.Team(number, 2, None),
        lambda: core._native.Team(0, 2, None, number),
    ):
        with pytest.raises(ValueError, match=r"negative or too large|must be in|a team has 1 to|int"):
            call()
    for wrong in (number if number != 99 else 0, 257):
        with pytest.raises(ValueError, match=r"negative or too large|must be in|a team has 1 to"):
            core._native.third_bytes(wrong)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, -1.0, 0.5, 1e16, 1e300])
@pytest.mark.parametrize("column", [0, 1])
def test_rows_of_an_update(team, wrong, column):
    rule = [0.0, 4.0, *[0.1] * (len(core._native.SGD_ROW) - 2)]
    rule[column] = wrong
    rows = torch.tensor([rule], dtype=torch.float64)
    x = torch.ones(4)
    with pytest.raises(ValueError, match="whole number"):
        team.update(x.data_ptr(), x.data_ptr(), x.data_ptr(), 0, 0, rows.data_ptr(), 1, 1.0)
    table = torch.tensor([[x.data_ptr()] * 3], dtype=torch.int64)
    with pytest.raises(ValueError, match="whole number"):
        core._native.lars_step(table.data_ptr(), rows.data_ptr(), 1)


def test_rows_that_reach_beyond_the_memory_are_refused_before_they_are_read(team):
    rows = torch.tensor([[0.0, 1e15, *[0.1] * (len(core._native.SGD_ROW) - 2)]], dtype=torch.float64)
    x = torch.ones(4)
    status = team.update(x.data_ptr(), x.data_ptr(), x.data_ptr(), 0, 0, rows.data_ptr(), 1, 1.0)
    assert core._native.STATUSES[status] == "refused"


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, 1e10])
def test_timeouts(seconds):
    with pytest.raises(ValueError, match="timeout"):
        core._native.Team(0, 1, None, 0, seconds)


@pytest.mark.parametrize("nbytes", [0, 1, 2**63, 2**64 - 1])
def test_memory_that_wraps_around_is_nobodys(team, nbytes):
    x = torch.ones(4).data_ptr()
    assert not team.owns(x, nbytes)
    assert not team.owns(2**63 - 1, nbytes)
