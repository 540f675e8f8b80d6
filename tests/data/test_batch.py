"""Batch plans: stages by epoch, and a total batch that ranks and micro-steps divide without rest."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long import times

from phalanx.data import BatchPlan, Stage
from phalanx.data.batch import Split
from phalanx.data.position import Steps

SONY = BatchPlan([Stage(epochs=30, batch=32768), Stage(epochs=60, batch=65536)])
IMAGENET = 1_281_167


def test_stages_follow_each_other_and_the_last_goes_on():
    assert SONY.epochs == 90
    assert [SONY.at(epoch).batch for epoch in (0, 29, 30, 89, 90, 1000)] == [32768, 32768, 65536, 65536, 65536, 65536]


def test_a_plan_is_a_value():
    assert BatchPlan(iter(SONY.stages)) == SONY
    assert hash(SONY) == hash(BatchPlan(SONY.stages))
    with pytest.raises(dataclasses.FrozenInstanceError):
        SONY.stages[0].batch = 1


@pytest.mark.parametrize("last", ["drop", "pad", "keep"])
def test_steps_and_samples_before_an_epoch_are_sums(last):
    plan = BatchPlan([Stage(2, 8), Stage(1, 12), Stage(3, 5)])
    for n in (12, 13, 40):
        for epoch in range(12):
            all_steps = [Steps(n, plan.at(e).batch, last) for e in range(epoch)]
            assert plan.steps_before(epoch, n, last) == sum(map(len, all_steps))
            assert plan.samples_before(epoch, n, last) == sum(len(step) for steps in all_steps for step in steps)


def test_the_plan_of_the_paper_in_steps():
    assert SONY.steps_before(90, IMAGENET) == 30 * (IMAGENET // 32768) + 60 * (IMAGENET // 65536)


def test_splits():
    assert Stage(1, 65536).split(512) == Split(ranks=512, micro_steps=1, micro_batch=128)
    assert Stage(1, 65536).split(512, micro_batch=64) == Split(512, 2, 64)
    assert Stage(1, 65536, micro_steps=4).split(512) == Split(512, 4, 32)
    assert Stage(1, 96).split(3, micro_batch=64) == Split(3, 1, 32)  # all fits in one


@settings(max_examples=times(300, seldom=120), deadline=None)
@given(st.integers(1, 3000), st.integers(1, 20), st.integers(1, 6), st.booleans())
def test_a_split_is_exact_or_the_error_names_batches_that_are_possible(batch, ranks, number, as_size):
    stage, most = (Stage(1, batch), number) if as_size else (Stage(1, batch, micro_steps=number), None)
    try:
        split = stage.split(ranks, most)
    except ValueError as error:
        suggested = [int(word) for word in str(error).partition("nearest that do are ")[2].split(" and ")]
        assert suggested
        for other in suggested:
            dataclasses.replace(stage, batch=other).split(ranks, most)
        below, above = ([b for b in suggested if b < batch] or [0])[0], max(suggested)
        for between in range(below + 1, above):
            with pytest.raises(ValueError, match="does not divide"):
                dataclasses.replace(stage, batch=between).split(ranks, most)
    else:
        assert split.ranks * split.micro_steps * split.micro_batch == batch
        assert most is None or split.micro_batch <= most


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Stage(1, 100).split(3),
            "batch of 100 does not divide over 3 ranks and 1 micro-step: the nearest that do are 99 and 102",
        ),
        (lambda: Stage(1, 100).split(3, micro_batch=8), "3 ranks and micro-batches of 8: the nearest that do are 96 and 120"),
        (lambda: Stage(1, 2).split(3), "nearest that do are 3"),
        (lambda: Stage(1, 8, micro_steps=2).split(2, micro_batch=2), "it has micro_steps already"),
        (lambda: Stage(1, 8).split(0), "ranks=0"),
        (lambda: Stage(1, 8).split(1, micro_batch=0), "micro_batch=0"),
        (lambda: Stage(0, 8), "epochs=0"),
        (lambda: Stage(1, 0), "batch=0"),
        (lambda: Stage(1, 8, micro_steps=0), "micro_steps=0"),
        (lambda: BatchPlan([]), "at least one Stage"),
        (lambda: BatchPlan([32768]), "at least one Stage"),
        (lambda: SONY.at(-1), "epoch=-1"),
        (lambda: SONY.steps_before(-1, 10), "epoch=-1"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_fraction_is_no_batch():
    with pytest.raises(TypeError, match=r"batch=1\.5"):
        Stage(1, 1.5)
