"""Typed components and the flat settings that `--set` knows: the same values under the same names."""

import inspect
from dataclasses import MISSING, fields

import pytest

from phalanx.train.model import ModelConfig
from phalanx.train.networks import NETWORKS, ResNet50Config, ResNetCifarConfig
from phalanx.train.optimizers import RULES, LarsConfig, SgdConfig
from phalanx.train.update import OptimizerConfig


def with_required(kind):
    """A component with its defaults; a required field gets a number."""
    return kind(**{f.name: 20 for f in fields(kind) if f.default is MISSING})


@pytest.mark.parametrize(("flat", "table"), [(ModelConfig, NETWORKS), (OptimizerConfig, RULES)])
def test_every_component_survives_as_settings(flat, table):
    for name, kind in table.items():
        component = with_required(kind)
        settings = flat.of(component)
        assert settings.name == name
        assert (settings.network if flat is ModelConfig else settings.rule) == component


def test_defaults_agree():
    """A rule that is named has the defaults of its component, whether settings or components say so."""
    for name, kind in RULES.items():
        assert OptimizerConfig(name=name).rule == kind()
    for name, kind in NETWORKS.items():
        required = {f.name: 20 for f in fields(kind) if f.default is MISSING}
        assert ModelConfig(name=name, **required).network == kind(**required)


def test_recipes_and_settings_write_the_same():
    typed = ModelConfig.of(ResNet50Config(zero_gamma=True), channels_last=True)
    assert typed == ModelConfig(name="resnet50", zero_gamma=True, channels_last=True)
    assert OptimizerConfig.of(LarsConfig(eps=1e-6)) == OptimizerConfig(name="lars", eps=1e-6)


def test_what_is_refused():
    with pytest.raises(TypeError, match="depth"):
        ResNetCifarConfig()
    with pytest.raises(TypeError, match="eps"):
        SgdConfig(eps=1.0)
    with pytest.raises(TypeError, match="none of SgdConfig, LarsConfig"):
        OptimizerConfig.of(ResNet50Config())
    with pytest.raises(ValueError, match="zero_gamma=True: only resnet_cifar, resnet18, resnet50 have one, mlp has not"):
        ModelConfig(name="mlp", zero_gamma=True)
    with pytest.raises(ValueError, match="depth=0: only resnet_cifar, gpt have one"):
        ModelConfig(depth=0)


def test_of_takes_every_option_of_a_model():
    """What `ModelConfig.of` does not take from a network it takes by name, with the same default."""
    own = {name: p.default for name, p in inspect.signature(ModelConfig.of).parameters.items() if name != "network"}
    of_networks = {f.name for kind in NETWORKS.values() for f in fields(kind)}
    assert own == {f.name: f.default for f in fields(ModelConfig) if f.name not in {"name", "args", *of_networks}}
