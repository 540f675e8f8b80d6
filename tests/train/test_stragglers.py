"""Who holds the others up: named when sure, with its cause; nobody on a healthy machine, however noisy."""

import random
import time
from dataclasses import replace

import pytest
from tests.train.runs import TINY, rows

import phalanx
from phalanx.train import stragglers
from phalanx.train.log import Log
from phalanx.train.stragglers import INTERVALS, SECONDS, Straggler, StragglerWatch, Times, suspect
from phalanx.train.trainer import assemble

EVEN = Times(input=0.001, compute=0.100, wait=0.010, update=0.005)


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize(
    ("slow", "cause"),
    [
        (replace(EVEN, compute=0.200, wait=0.0), "compute"),
        (replace(EVEN, input=0.101, wait=0.0), "input"),
        (replace(EVEN, input=0.100, compute=0.150, wait=0.0), "input"),
    ],
)
def test_the_slow_rank_and_its_cause(ranks, slow, cause):
    times = [replace(EVEN, wait=0.110)] * ranks
    times[ranks - 1] = slow
    found = suspect(times)
    assert (found.rank, found.cause) == (ranks - 1, cause)
    assert found.factor == pytest.approx((slow.input + slow.compute) / 0.101)
    assert f"rank {ranks - 1}" in str(found)


def test_a_slow_network_is_nobodys_fault():
    found = suspect([replace(EVEN, wait=0.300), replace(EVEN, wait=0.310)])
    assert (found.rank, found.cause) == (None, "network")
    assert "network" in str(found)
    assert suspect([replace(EVEN, wait=0.300), replace(EVEN, wait=0.010)]) is None, "one rank alone waits for another one"


def test_equal_ranks_one_rank_and_tiny_differences():
    assert suspect([EVEN] * 4) is None
    assert suspect([replace(EVEN, compute=9.0)]) is None
    assert suspect([Times(compute=0.001), Times(compute=0.004)]) is None, "nobody minds 3 ms"
    assert suspect([Times(), Times()]) is None


def test_named_when_sure_and_once():
    watch, slow = StragglerWatch(), [EVEN, replace(EVEN, compute=0.3)]
    told = [watch.interval(slow, SECONDS / 5) for _ in range(12)]
    assert [found is not None for found in told] == [i == 4 for i in range(12)]
    assert watch.interval([EVEN, EVEN], 1.0) is None
    again = [watch.interval(slow, SECONDS) for _ in range(INTERVALS + 1)]
    assert [found is not None for found in again] == [i == INTERVALS - 1 for i in range(INTERVALS + 1)]


def test_noise_is_nobodys_fault():
    """Steps of 16 ms, on a machine that stops one rank or the other for up to three times that, in every interval."""
    generator, watch = random.Random(0), StragglerWatch()
    suspects = 0
    for _ in range(500):
        times = [Times(compute=0.016 * generator.choice([1, 1, 1.2, 2.5])) for _ in range(2)]
        suspects += suspect(times) is not None
        assert watch.interval(times, 0.16) is None
    assert suspects > 100, "a watch without patience would pass, too"


@pytest.mark.parametrize("cause", ["compute", "input"])
def test_a_rank_that_sleeps_is_named_by_a_run(tmp_path, monkeypatch, cause):
    monkeypatch.setattr(stragglers, "SECONDS", 0.3)
    config = replace(TINY, epochs=1, log_every=3, rate=replace(TINY.rate, warmup=0.0))

    def play(comm):
        with Log(config, comm, tmp_path, resume=False, show=False) as log:
            trainer = assemble(config, comm, log)
            if comm.rank == 1 and cause == "compute":
                forward = trainer.forward
                trainer.forward = lambda x: (time.sleep(0.15), forward(x))[1]
            if comm.rank == 1 and cause == "input":
                steps = trainer.loader.steps
                trainer.loader.steps = lambda: ((time.sleep(0.15), step)[1] for step in steps())
            with trainer.loader, trainer.test:
                trainer.run(None, resume=False)

    phalanx.run_local(3, play)
    told = [(row["rank"], row["cause"]) for row in rows(tmp_path, "straggler")]
    assert told == [(1, cause)]


def test_words():
    assert str(Straggler(3, "input", 2.04)) == "rank 3 slows the others down: its input takes 2.0 times as long as theirs"
