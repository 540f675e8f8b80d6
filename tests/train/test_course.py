"""The course of a run: what every step is given, as the configuration says and as the trainer does."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.long import only_long
from tests.train.runs import TINY, InterruptedRunError, distance, rows, run, same

from phalanx.data import BatchPlan, Stage
from phalanx.optim import lr
from phalanx.optim.lars import Lars
from phalanx.train.config import ConfigError, override
from phalanx.train.course import Course
from phalanx.train.update import OptimizerConfig, RateConfig

STAGED = replace(
    TINY,
    epochs=3,
    stages=(Stage(1, 60), Stage(2, 120)),
    optimizer=OptimizerConfig(name="lars", trust_coefficient=0.02, momentum_rule="noise", correct_momentum=True),
    rate=RateConfig(peak=1.0, scaling="sqrt", reference=120, warmup=0.5),
    log_every=1,
)
stages = st.lists(st.builds(Stage, epochs=st.integers(1, 3), batch=st.integers(1, 40)), min_size=1, max_size=3)


@given(stages, st.integers(40, 100), st.sampled_from(["drop", "pad", "keep"]))
def test_steps_are_those_of_counting(plan, samples, last):
    """The stupid oracle: walk through the epochs."""
    course = Course(BatchPlan(plan), RateConfig(decay="linear"), OptimizerConfig())
    number = 0
    for epoch in range(course.plan.epochs):
        batch = course.plan.at(epoch).batch
        in_epoch = samples // batch if last == "drop" else -(-samples // batch)
        for i in range(in_epoch):
            number += 1
            found = course.at_step(number, samples, last)
            assert (found.number, found.batch) == (number, batch)
            assert found.progress == pytest.approx(epoch + (i + 1) / in_epoch)
            assert found.rate == pytest.approx(0.1 * (1 - found.progress / course.plan.epochs), abs=1e-12)
    for wrong in (0, number + 1):
        with pytest.raises(ValueError, match=f"step {wrong}: the run has {number} steps"):
            course.at_step(wrong, samples, last)


@pytest.mark.parametrize(("scaling", "factors"), [("linear", (0.5, 1.0, 4.0)), ("sqrt", (0.5**0.5, 1.0, 2.0))])
def test_the_rate_follows_the_batch(scaling, factors):
    plan = BatchPlan([Stage(1, 64), Stage(1, 128), Stage(1, 512)])
    rate = RateConfig(peak=0.3, scaling=scaling, reference=128, decay="constant")
    course = Course(plan, rate, OptimizerConfig())
    assert [course.at(epoch, 1.0).rate for epoch in range(3)] == pytest.approx([0.3 * factor for factor in factors])


@pytest.mark.parametrize("scaling", ["none", "linear", "sqrt"])
def test_momentum_keeps_the_noise(scaling):
    plan = BatchPlan([Stage(1, 128), Stage(1, 512)])
    rate = RateConfig(scaling=scaling, reference=None if scaling == "none" else 128, decay="constant")
    course = Course(plan, rate, OptimizerConfig(momentum=0.8, momentum_rule="noise"))
    noise = [m.rate / (m.batch * (1 - m.momentum)) for m in (course.at(0, 0.5), course.at(1, 0.5))]
    assert noise[0] == pytest.approx(noise[1])
    fixed = Course(plan, rate, OptimizerConfig(momentum=0.8))
    assert fixed.at(1, 0.5).momentum == 0.8
    assert (scaling == "linear") == (course.at(1, 0.5).momentum == pytest.approx(0.8)), "the linear rule keeps it by itself"


def test_a_plan_that_no_momentum_fits_is_refused():
    with pytest.raises(ValueError, match="no momentum keeps the noise"):
        replace(TINY, epochs=2, stages=(Stage(1, 120), Stage(1, 4)), optimizer=OptimizerConfig(momentum_rule="noise")).course  # noqa: B018


def test_an_optimizer_is_given_what_the_course_says():
    weight = torch.nn.Parameter(torch.ones(3, 3))
    optimizer = Lars([weight], lr=0.0)
    for epoch, done in ((0, 0.25), (0, 1.0), (1, 0.5), (2, 1.0)):
        wanted = STAGED.course.at(epoch, done)
        assert STAGED.course.steer(optimizer, epoch, epoch + done) == wanted.rate
        (group,) = optimizer.param_groups
        assert (group["lr"], group["momentum"]) == (wanted.rate, wanted.momentum)


def test_the_velocity_follows_the_rate_if_asked():
    for correct, factor in ((True, 0.25), (False, 1.0)):
        course = Course(
            BatchPlan([Stage(2, 8)]),
            RateConfig(peak=1.0, decay="step", steps=(1.0,), factor=0.25),
            OptimizerConfig(name="lars", correct_momentum=correct),
        )
        weight = torch.nn.Parameter(torch.ones(3, 3))
        optimizer = Lars([weight], lr=0.0)
        weight.grad = torch.ones(3, 3)
        course.steer(optimizer, 0, 0.5)
        optimizer.step()
        before = optimizer.state[weight]["momentum_buffer"].clone()
        course.steer(optimizer, 1, 1.5)
        assert torch.equal(optimizer.state[weight]["momentum_buffer"], before * factor)


def test_the_trainer_does_what_the_course_says(tmp_path):
    result, _ = run(STAGED, 2, tmp_path)
    told = rows(tmp_path, "interval")
    assert len(told) == result.steps == 23 + 2 * 11
    for row in told:
        wanted = STAGED.course.at_step(row["step"], 1437, "drop")
        assert (row["rate"], row["batch"]) == (wanted.rate, wanted.batch)
        assert row["epoch"] == pytest.approx(wanted.progress)


@pytest.mark.parametrize(
    "optimizer",
    [
        OptimizerConfig(name="rmsprop_warmup", ramp_center=0.5, ramp_period=0.5),
        OptimizerConfig(name="lars", trust_coefficient=0.02, lr_in_momentum=False),
    ],
    ids=lambda optimizer: optimizer.name,
)
def test_optimizers_equal_one_process(optimizer):
    config = replace(TINY, epochs=1, optimizer=optimizer, rate=RateConfig(peak=0.05 if optimizer.name != "lars" else 1.0))
    weights = run(config, 2)[1]
    assert distance(weights, run(config)[1]) < 1e-3
    assert distance(weights, run(replace(config, optimizer=OptimizerConfig()))[1]) > 1e-2, "plain SGD would pass, too"


@only_long
def test_a_staged_run_resumes_exactly(tmp_path):
    config = replace(STAGED, checkpoint_every_steps=1)
    whole = run(config, 2)
    with pytest.raises(InterruptedRunError):
        run(config, 2, tmp_path, interrupt=30)
    assert same(run(config, 2, tmp_path, resume=True)[1], whole[1])
    other = replace(config, optimizer=replace(config.optimizer, momentum_rule="fixed"))
    assert not same(run(other, 2)[1], whole[1]), "a momentum that does nothing would pass, too"


# ---- from settings to rules ---------------------------------------------------------------------------------------------------


def test_kinds_of_warm_up_and_of_decay():
    over = RateConfig(peak=2.0, warmup=4, warmup_kind="exponential", warmup_start=0.01, decay="linear", decay_epochs=2).over(10)
    assert over == 2.0 * (lr.exponential_warmup(4, 0.01) >> lr.linear(2))
    assert [over(x) for x in (0, 2, 4, 5, 6, 10)] == pytest.approx([0.02, 0.2, 2.0, 1.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"rate.scaling": "linear"}, "set both .peak is right for batches of reference., or none"),
        ({"rate.reference": "256"}, "set both .peak is right for batches of reference., or none"),
        ({"rate.scaling": "linear", "rate.reference": "0"}, "reference=0: samples, at least 1"),
        ({"rate.warmup_kind": "exponential"}, "a share of the peak, such as 0.01"),
        ({"rate.decay": "step", "rate.steps": "1", "rate.decay_epochs": "3"}, "not for decay=step"),
        ({"rate.decay_epochs": "0"}, "decay_epochs=0: more than 0"),
        ({"optimizer.correct_momentum": "true"}, "velocities that contain the rate"),
        (
            {"optimizer.name": "lars", "optimizer.correct_momentum": "true", "optimizer.lr_in_momentum": "false"},
            "contain the rate",
        ),
        ({"optimizer.name": "rmsprop_warmup"}, "nesterov=True: rmsprop_warmup has no such variant"),
        ({"optimizer.ramp_period": "0"}, "ramp_period=0.0: epochs, more than 0"),
        ({"stages": "1x60,2by120"}, "stages are written EPOCHSxBATCH"),
        ({"stages": "1"}, "stages are written EPOCHSxBATCH"),
        ({"stages": "0x60,2x120"}, "stages are written EPOCHSxBATCH"),
        ({"stages": "1x60"}, "the stages have 1 epochs, but epochs=2"),
    ],
)
def test_what_contradicts_itself(settings, told):
    with pytest.raises(ConfigError, match=told):
        override(TINY, settings)


def test_stages_as_text():
    assert override(TINY, {"stages": "1x60,1x120x2"}).stages == (Stage(1, 60), Stage(1, 120, 2))
    assert override(STAGED, {"stages": "", "epochs": "5"}).plan.stages == (Stage(5, 120),)
    assert override(STAGED, {"stages": "3x1_200"}).stages == (Stage(3, 1200),)
