"""Recipes of published runs: their rate, momentum, batch and epoch at given steps are the published ones."""

import pytest
import torch
from tests.train.runs import on_trainer

from phalanx.cli.train import load
from phalanx.train.config import override

IMAGENET = 1_281_167  # images to train with


def at_step(config, number):
    return config.course.at_step(number, IMAGENET, config.data.last)


def steps(config, epochs=None):
    return config.plan.steps_before(epochs or config.epochs, IMAGENET, config.data.last)


# ---- Fujitsu: mlcommons/training_results_v0.6, Fujitsu/.../JobScripts/parameters and the explorer of its MXNet ----------------


def fujitsu(step):
    """Their `power` decay after a linear warm-up: (1 - e) (1 - p)**d + e of --lr, e --end_lr_ratio, d --lr_decay."""
    if step <= 36 * 15:
        return 13.0 * step / (36 * 15)
    p = min((step - 36 * 15) / 780, 1.0)
    return 13.0 * ((1 - 0.0025) * (1 - p) ** 2.2 + 0.0025)


@pytest.mark.parametrize(
    ("step", "epoch", "rate"),
    [(1, 1 / 15, 13 / 540), (270, 18, 6.5), (540, 36, 13.0), (930, 62, 2.854716), (1320, 88, 0.0325), (1350, 90, 0.0325)],
)
def test_fujitsu_at_given_steps(step, epoch, rate):
    found = at_step(load("imagenet-fujitsu-74s"), step)
    assert (found.batch, found.momentum) == (86_016, 0.96)
    assert found.progress == pytest.approx(epoch)
    assert found.rate == pytest.approx(rate, rel=1e-5)


def test_fujitsu_over_all_steps():
    config = load("imagenet-fujitsu-74s")
    assert (steps(config), steps(config, 1)) == (1350, 15)
    for step in range(1, 1351):
        assert at_step(config, step).rate == pytest.approx(fujitsu(step), rel=1e-9)
    with pytest.raises(ValueError, match="step 1351: the run has 1350 steps"):
        at_step(config, 1351)


def test_fujitsu_besides_the_rate():
    config = load("imagenet-fujitsu-74s")
    assert config.plan.stages[0].split(ranks=2048).micro_batch == 42
    # its smoothing gives 0.9 to the right class and 0.1 / 999 to each other: ours gives 1 - s + s / 1000 and s / 1000
    assert config.label_smoothing / 1000 == pytest.approx(0.1 / 999)
    assert 1 - config.label_smoothing * 999 / 1000 == pytest.approx(0.9)
    assert config.optimizer.trust_coefficient * config.rate.peak == pytest.approx(0.0325)  # MLPerf's reference has 0.0312


def test_fujitsus_paper_has_16_steps():
    """Its batch of 81,920, 40 on each GPU: the recipe with one setting changed."""
    paper = override(load("imagenet-fujitsu-74s"), {"batch": "81920"})
    assert (steps(paper), steps(paper, 1)) == (1440, 16)
    assert paper.plan.stages[0].split(ranks=2048).micro_batch == 40


# ---- MLPerf: reference convergence point for 32,768 ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "epoch", "rate"), [(40, 1, 21.2 / 16), (320, 8, 10.6), (640, 16, 21.2), (2267, 56.675, 1e-4), (2280, 57, 1e-4)]
)
def test_mlperf_at_given_steps(step, epoch, rate):
    found = at_step(load("imagenet-resnet50-32k"), step)
    assert (found.batch, found.momentum) == (32_768, 0.94)
    assert found.progress == pytest.approx(epoch)
    assert found.rate == pytest.approx(rate, rel=1e-9)


def test_mlperf_decays_as_the_reference_does():
    """lars_util.py: PolynomialDecay of power 2 from the base rate to 1e-4, after the warm-up."""
    config = load("imagenet-resnet50-32k")
    for step in range(641, 2267):
        p = (step - 640) / (2267 - 640)
        assert at_step(config, step).rate == pytest.approx((21.2 - 1e-4) * (1 - p) ** 2 + 1e-4, rel=1e-9)


@pytest.mark.parametrize("ranks", [8, 64, 256])
def test_32k_fits_clusters_of_many_sizes(ranks):
    config = load("imagenet-resnet50-32k")
    assert config.plan.stages[0].split(ranks, config.micro_batch).micro_batch == 128


# ---- Sony, the 15-minute paper ------------------------------------------------------------------------------------------------


def test_sony_changes_the_batch():
    config = load("imagenet-sony-flash")
    small, large = (stage.split(ranks=2176) for stage in config.plan.stages)
    assert (small.micro_batch, large.micro_batch) == (16, 32)
    assert sum(stage.epochs for stage in config.stages) == 90
    at = steps(config, 30)
    before, after = at_step(config, at), at_step(config, at + 1)
    assert (before.batch, after.batch) == (34_816, 69_632)
    assert after.rate < before.rate  # no jump: what keeps the noise is the momentum
    assert before.batch * (1 - before.momentum) == pytest.approx(after.batch * (1 - after.momentum))
    assert at_step(config, steps(config, 5)).rate == config.rate.peak


@pytest.mark.parametrize(("epoch", "rate"), [(1, 6.4), (39, 6.4), (41, 0.96), (69, 0.96), (71, 0.128), (84, 0.128), (90, 0.0128)])
def test_15_minutes_at_given_epochs(epoch, rate):
    config = load("imagenet-15-minutes")
    assert at_step(config, steps(config, epoch)).rate == pytest.approx(rate)


def test_15_minutes_begins_as_rmsprop():
    config = load("imagenet-15-minutes")
    optimizer = config.optimizer.build(torch.nn.Linear(2, 2))
    shares = []
    for epoch in (0, 10, 11, 13):
        config.course.steer(optimizer, epoch, epoch)
        shares.append(optimizer.param_groups[0]["sgd_share"])
    assert shares == pytest.approx([0.5 * 2.718281828**-4, 0.5, 0.7, 1.0])


# ---- all of them -------------------------------------------------------------------------------------------------------------

SMALL = {
    "data.source": "synthetic:3x32x32,classes=10,n=64",
    "model.name": "resnet_cifar",  # of the same family: resnet50 takes seconds for a step
    "model.depth": "8",
    "batch": "16",
    "stages": "",
    "micro_batch": "none",
    "mllog": "false",
    "model.precision": "float32",  # 16 bits in processes of their own: tests/world/test_trainer.py
}


@pytest.mark.parametrize("name", ["imagenet-fujitsu-74s", "imagenet-sony-flash", "imagenet-resnet50-32k", "imagenet-15-minutes"])
def test_a_step_is_possible(name):
    """With everything that the recipe asks for, on other data, in a batch of 16 and a network of 8 layers."""
    config = override(load(name), SMALL)

    def act(trainer):
        before = {key: p.detach().clone() for key, p in trainer.model.named_parameters()}
        steps = trainer.loader.steps()
        for _ in range(2):
            trainer.update(next(steps), 0.5, input_seconds=0.0)
        return [key for key, p in trainer.model.named_parameters() if torch.equal(p, before[key]) or not p.isfinite().all()]

    assert on_trainer(config, 2, act) == [[], []]
