"""The network of a run: its batch norms across ranks, and weights that depend on names."""

from dataclasses import replace

import pytest
import torch
from tests.train.runs import DIGITS, distance, on_trainer, run
from torch import nn

from phalanx.train.config import ConfigError, RunConfig, override
from phalanx.train.model import BatchNormConfig, ModelConfig
from phalanx.train.networks import SampleFacts
from phalanx.train.update import RateConfig

NORMED = RunConfig(
    name="normed", epochs=1, batch=120, model=ModelConfig(name="resnet9", width=2), data=DIGITS, rate=RateConfig(peak=0.05)
)


def with_norms(**options):
    return replace(NORMED, model=replace(NORMED.model, batchnorm=BatchNormConfig(**options)))


@pytest.fixture(scope="module")
def alone():
    return run(NORMED)


def test_shared_statistics_equal_one_process(alone):
    assert distance(run(with_norms(statistics="shared"), 2)[1], alone[1]) < 1e-4
    assert distance(run(NORMED, 2)[1], alone[1]) > 1e-3, "statistics of each rank's own would pass, too"


def test_groups_share_statistics():
    """Two groups of one rank each are ranks with statistics of their own."""
    assert distance(run(with_norms(statistics="shared", group=1), 2)[1], run(NORMED, 2)[1]) < 1e-4


def test_a_group_is_no_larger_than_the_world():
    with pytest.raises(ConfigError, match=r"model.batchnorm.group=3: at most the number of ranks, 2"):
        run(with_norms(statistics="shared", group=3), 2)


def test_the_last_batch_alone():
    """Its statistics, whatever came before: those of a second run over the same last batch are the same."""

    def act(trainer):
        steps = list(trainer.loader.steps())
        seen = []
        for order in (steps, steps[-1:]):
            for step in order:
                trainer.model(step.micro[0][0])
            seen.append(trainer.model.stem.bn.running_mean.clone())
        return seen

    first, second = on_trainer(with_norms(last_batch=True), 1, act)[0]
    assert torch.allclose(first, second)
    first, second = on_trainer(NORMED, 1, act)[0]
    assert not torch.allclose(first, second)


def test_the_share_of_a_new_batch():
    for options, share in (({"momentum": 0.03}, 0.03), ({"last_batch": True}, 1.0), ({}, 0.1)):
        found = on_trainer(with_norms(**options), 1, lambda trainer: {m.momentum for m in norms(trainer.model)})[0]
        assert found == {share}


def norms(model):
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]


@pytest.mark.parametrize("name", ["small_cnn", "strided_cnn", "resnet9"])
def test_weights_by_name_do_not_depend_on_what_was_drawn_before(name):
    model = ModelConfig(name=name, width=2, initialise="name")
    built = [model.build(SampleFacts((1, 8, 8), classes), seed=3).state_dict() for classes in (10, 10, 12)]
    assert all(torch.equal(built[0][key], built[1][key]) for key in built[0])
    first = next(iter(built[0]))  # a layer before the one that differs
    assert torch.equal(built[0][first], built[2][first])
    assert not torch.equal(built[0][first], model.build(SampleFacts((1, 8, 8), 10), seed=4).state_dict()[first])
    assert not torch.equal(
        built[0][first], replace(model, initialise="order").build(SampleFacts((1, 8, 8), 10), seed=3).state_dict()[first]
    )


@pytest.mark.parametrize("initialise", ["order", "name"])
def test_zero_gamma(initialise):
    for zero in (True, False):
        model = ModelConfig(name="resnet_cifar", depth=8, zero_gamma=zero, initialise=initialise)
        built = model.build(SampleFacts((1, 8, 8), 10), seed=0)
        assert sum(not norm.weight.any() for norm in norms(built)) == (3 if zero else 0)
        assert all(norm.weight.eq(norm.weight[0]).all() for norm in norms(built))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"model.batchnorm.group": "2"}, "statistics=shared"),
        ({"model.batchnorm.momentum": "0"}, "more than 0 and at most 1"),
        ({"model.batchnorm.momentum": "0.2", "model.batchnorm.last_batch": "true"}, "keeps no moving average"),
        ({"model.batchnorm.statistics": "shared", "data.last": "keep"}, "data.last=drop or pad"),
        ({"model.batchnorm.statistics": "shared", "data.on_bad": "skip"}, "data.on_bad=error"),
        ({"model.name": "small_cnn", "model.batchnorm.momentum": "0.2"}, "small_cnn has no batch norms"),
        ({"data.last": "keep", "comm.fused": "true"}, "comm.fused=True needs equally many samples"),
    ],
)
def test_what_is_refused(settings, told):
    with pytest.raises(ConfigError, match=told):
        override(NORMED, settings)
