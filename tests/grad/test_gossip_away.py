"""Gossip among threads of which one is away for a while: it takes over a replica, and round and steps of the others."""

import time
import warnings

import pytest
import torch
from tests.long import often, only_long

import phalanx
from phalanx import CommunicationError, Gossip, create_multi_node_optimizer

IMPATIENT = 0.2  # seconds


def run_with_sleeper(n, steps, *, seconds, make=None, sleeper=1, loop=None, nap=0.005, **options):
    """What each rank has after so many steps of all, of which rank `sleeper` slept through some."""
    make = make or (lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9))

    def run(comm):
        p = torch.nn.Parameter(torch.zeros(50))
        opt = create_multi_node_optimizer(make([p]), comm, sync=Gossip(patience=IMPATIENT, **options))
        target = torch.randn(50, generator=torch.Generator().manual_seed(comm.rank))
        own, arrived = 0, 0
        while (opt.steps if loop is None else own) < steps:
            opt.zero_grad()
            ((p - target) ** 2).sum().backward()
            if comm.rank == sleeper and own == 20:
                time.sleep(seconds)
            opt.step()
            own += 1
            arrived += opt.last_record is not None and opt.steps > steps - 10
            time.sleep(nap)
        distance = opt.spread()
        steps_of_state = [state["step"].item() for state in opt.optimizer.state.values() if "step" in state]
        opt.average_()
        return {
            "own": own,
            "steps": opt.steps,
            "arrived": arrived,
            "round": opt.communication.round,
            "spread": distance,
            "missing": opt.missing,
            "p": p.detach(),
            "adam": steps_of_state,
        }

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = phalanx.run_local(n, run, timeout=30)
    return results, [str(w.message) for w in caught]


@pytest.mark.parametrize(
    ("exchange", "overlap"), [("weights", True), ("gradients", False), *often(("weights", False), ("gradients", True))]
)
def test_a_sleeper_takes_part_again(exchange, overlap):
    results, told = run_with_sleeper(4, 180, seconds=1.2, nap=0.01, exchange=exchange, overlap=overlap)
    assert {found["steps"] for found in results} == {180}
    assert len({found["round"] for found in results}) == 1
    assert results[1]["own"] < 180
    assert all(found["own"] == 180 for r, found in enumerate(results) if r != 1)
    assert all(found["arrived"] > 4 for found in results), results
    assert all(found["missing"] == () for found in results)
    assert all(torch.equal(found["p"], results[0]["p"]) for found in results)
    assert any("rank 1: it was left behind by" in text and "takes over the replica of rank" in text for text in told), told


def test_the_whole_state_of_the_optimizer_is_taken_over():
    results, _ = run_with_sleeper(3, 200, seconds=1.2, make=lambda params: torch.optim.Adam(params, lr=0.01))
    assert results[1]["own"] < 200
    counted = [found["adam"][0] for found in results]
    assert counted[0] == counted[2] == 200
    assert results[1]["own"] + 10 < counted[1] <= 200  # Adam counts its steps itself: the others' count, but for the way back


@pytest.mark.parametrize("exchange", ["weights", "gradients"])
def test_a_sleeper_comes_to_the_averages_of_all(exchange):
    results, _ = run_with_sleeper(3, 120, seconds=1.5, exchange=exchange, average_every=30)
    assert {found["steps"] for found in results} == {120}
    assert all(torch.equal(found["p"], results[0]["p"]) for found in results)
    assert all(found["missing"] == () for found in results)


@only_long
def test_who_counts_its_own_steps_trains_on_alone_but_does_not_count_in_the_mean():
    results, told = run_with_sleeper(3, 150, seconds=1.5, loop="own")
    assert all(found["own"] == 150 for found in results)
    assert all(torch.equal(found["p"], results[0]["p"]) for found in results)
    assert any("rank 1: it trained alone for" in text and "does not count in the mean" in text for text in told), told


def test_who_did_not_come_to_an_average_is_left_out_and_stops():
    """The others wait for as long as the communicator does; the one that is late learns that they went on."""
    ended = {}

    def run(comm):
        p = torch.nn.Parameter(torch.zeros(5))
        opt = create_multi_node_optimizer(torch.optim.SGD([p], lr=0.1), comm, sync=Gossip(patience=IMPATIENT))
        p.grad = torch.ones(5)
        for _ in range(10):
            opt.step()
        if comm.rank == 2:
            time.sleep(6)
            try:
                for _ in range(10):
                    opt.step()
                opt.average_()
            except CommunicationError as error:
                ended["error"] = error
            return None
        opt.average_()
        left = opt.survivors()
        for _ in range(200):
            opt.step()
            time.sleep(0.02)
        found = left.size, opt.missing
        left.barrier()  # who ends before the other has looked is missing, too
        return found

    with pytest.warns(UserWarning, match="rank 2 cannot be reached any more"):
        results = phalanx.run_local(3, run, timeout=4)
    assert results == [(2, (2,)), (2, (2,)), None]
    assert "rank 2: gossip stops here" in str(ended["error"])
    assert "start the job again" in str(ended["error"])


@only_long
def test_alone_in_a_roll_call_is_an_error_not_a_mean():
    """Two of three never come: the third must not give its own replica for the mean of all."""

    def run(comm):
        p = torch.nn.Parameter(torch.zeros(5))
        opt = create_multi_node_optimizer(torch.optim.SGD([p], lr=0.1), comm, sync=Gossip(patience=IMPATIENT))
        p.grad = torch.ones(5)
        for _ in range(5):
            opt.step()
        if comm.rank != 1:
            time.sleep(8)
            return
        for ask in (opt.average_, opt.spread, opt.survivors):
            with pytest.raises(CommunicationError) as caught:
                ask()
            told.append(caught.value)

    told = []
    with pytest.warns(UserWarning, match="ranks 0, 2 cannot be reached"):
        phalanx.run_local(3, run, timeout=4)
    assert "cannot reach ranks 0, 2: 1 of 3 ranks are not a majority" in str(told[0])
    assert told[0].missing == (0, 2)
    assert all("not a majority" in str(error) for error in told)
