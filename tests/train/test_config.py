"""A run as a value: what can be set, how it is read from text, and what is refused with which words."""

import json
from dataclasses import FrozenInstanceError, replace

import pytest

from phalanx.cli.train import load, recipe_names
from phalanx.data import Stage
from phalanx.optim import lr
from phalanx.train.config import ConfigError, RunConfig, describe_settings, identity, override, parse, paths, plain
from phalanx.train.model import ModelConfig
from phalanx.train.update import RateConfig

CONFIG = RunConfig(name="test")
STAGED = replace(CONFIG, epochs=3, stages=(Stage(1, 120), Stage(2, 240)))


def as_text(value):
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize("name", [*recipe_names(), "staged"])
def test_everything_that_is_shown_can_be_set_to_what_it_is(name):
    config = STAGED if name == "staged" else load(name)
    settable = {path: as_text(value) for path, value in paths(config) if value != () and not isinstance(value, lr.Rule)}
    assert override(config, settable) == config
    assert len(dict(paths(config))) > 40


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("epochs", "5", 5),
        ("batch", "32_768", 32768),
        ("optimizer.momentum", "0.8", 0.8),
        ("optimizer.weight_decay", "1e-4", 1e-4),
        ("optimizer.nesterov", "true", True),
        ("optimizer.nesterov", "off", False),
        ("model.precision", "bfloat16", "bfloat16"),
        ("data.mean", "0.25", (0.25,)),
        ("data.area", "(0.1, 1)", (0.1, 1.0)),
        ("micro_batch", "16", 16),
        ("comm.bucket_bytes", "none", None),
        ("comm.fused", "True", True),
        ("comm.algorithm", "torus:1x2", "torus:1x2"),
        ("data.source", "cifar10:a=b", "cifar10:a=b"),
        ("checkpoint_every_steps", "100", 100),
        ("target", "", None),
    ],
)
def test_values_are_read_by_their_type(path, text, value):
    config = override(CONFIG, {path: text})
    assert dict(paths(config))[path] == value
    assert {p: v for p, v in paths(config) if p != path} == {p: v for p, v in paths(CONFIG) if p != path}


def test_the_reference_has_every_setting():
    """As many as --set takes, each with a sentence and a default that --set takes, too."""
    found = describe_settings()
    fixed = [s.name for s in found if ".N." not in s.name and not s.name.endswith(".args.NAME")]
    assert fixed == [path for path, _ in paths(CONFIG)]
    assert [s.name for s in found if s.name.endswith(".NAME")] == [
        f"{part}.args.NAME" for part in ("model", "data", "optimizer", "loss")
    ]
    assert {s.name for s in found if ".N." in s.name} == {
        path.replace(".0.", ".N.") for path, _ in paths(STAGED) if ".0." in path
    }
    for s in found:
        assert s.type
        assert s.sentence.endswith(".")
    defaults = {s.name: s.default for s in found if s.name in fixed and s.default is not None}
    assert override(CONFIG, defaults) == CONFIG
    assert [s.name for s in found if s.default is None] == ["name", "stages.N.epochs", "stages.N.batch"]


def test_settings_that_only_make_sense_together():
    config = override(CONFIG, {"model.name": "resnet_cifar", "model.depth": "20"})
    assert config.model == ModelConfig(name="resnet_cifar", depth=20)
    config = override(STAGED, {"stages.0.epochs": "2", "epochs": "4"})
    assert config.stages == (Stage(2, 120), Stage(2, 240))


@pytest.mark.parametrize(
    ("path", "text", "told"),
    [
        ("epoch", "5", r"epoch: there is no such setting \(epochs\?\); there are name, epochs, batch"),
        ("optimizer.momentun", "5", r"optimizer.momentum\?"),
        ("stages.0.batch", "5", "there is no such setting"),
        ("rate", "0.1", "rate has its own settings: rate.peak, rate.scaling"),
        ("model.args", "64", "model.args: an argument has a name, such as model.args.width=64"),
        ("model.args.", "64", "an argument has a name"),
        ("model.args.a-b", "64", "an argument has a name"),
        ("model.args.width", "64", r"args \(width\) are for your own network; small_cnn has settings, such as model.width"),
        ("data.args.n", "64", r"args \(n\) are for your own source, not for digits"),
        ("optimizer.args.betas", "[0.9]", r"args \(betas\): sgd has settings"),
        ("loss.args.gamma", "2", r"args \(gamma\) are for your own loss: set loss as well"),
        ("loss", "focal", "loss.name=focal: one of none, or an import path"),
        ("task", "poetry", "task=poetry: one of classification, language, regression, or an import path"),
        ("epochs", "five", "epochs=five: a whole number"),
        ("epochs", "5.0", "epochs=5.0: a whole number"),
        ("epochs", "0", "epochs=0: at least 1"),
        ("rate.peak", "high", "rate.peak=high: a number"),
        ("rate.peak", "nan", "finite"),
        ("rate.peak", "-1", "peak=-1.0: 0 or more"),
        ("optimizer.nesterov", "maybe", "true or false"),
        ("optimizer.name", "adamz", "optimizer.name=adamz: one of sgd, lars, rmsprop_warmup, .*adamw.*, or an import path"),
        ("optimizer", "lbfgs", "optimizer.name=lbfgs: LBFGS computes the loss several times per step"),
        ("model.name", "vgg", "one of small_cnn, mlp, strided_cnn, resnet_cifar"),
        ("model.name", "resnet_cifar", "resnet_cifar has a depth"),
        ("model.depth", "20", "only resnet_cifar, gpt have one"),
        ("data.area", "0.1", "2 values, separated by commas"),
        ("data.std", "0", "std above 0"),
        ("rate.rule", "linear", "written in a recipe"),
        ("rate.steps", "1,2", "only decay=step has some"),
        ("rate.decay", "step", "decay=step has steps"),
        ("target", "97", "target=97.0: an accuracy"),
        ("label_smoothing", "1", "label_smoothing=1.0: from 0 to less than 1"),
        ("seed", "-1", "seed=-1"),
        ("comm.wire", "int4", "one of float16, bfloat16, int8, powersgd"),
        ("comm.timeout", "0", "seconds, more than 0"),
        ("optimizer.momentum", "-0.1", "momentum=-0.1: 0 or more"),
        ("optimizer.momentum", "1", "momentum=1.0: less than 1"),
    ],
)
def test_what_is_refused(path, text, told):
    with pytest.raises(ConfigError, match=told) as caught:
        override(CONFIG, {path: text})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"model.precision": "float16", "comm.double_buffering": "true"},
        {"comm.fused": "true", "comm.wire": "bfloat16"},
        {"comm.fused": "true", "data.on_bad": "skip"},
        {"optimizer.name": "lars", "optimizer.decay_all": "true"},
        {"optimizer.nesterov": "true", "optimizer.momentum": "0"},
        {"optimizer.name": "adamw", "optimizer.momentum_rule": "noise"},
        {"label_smoothing": "0.1", "loss": "my_losses:focal"},
        {"label_smoothing": "0.1", "task": "regression"},
    ],
)
def test_options_that_exclude_each_other(settings):
    for path, text in settings.items():
        if path != "optimizer.nesterov" or "optimizer.momentum" not in settings:
            override(CONFIG, {path: text})
    with pytest.raises(ConfigError):
        override(CONFIG, settings)


def test_stages_have_the_epochs_of_the_run():
    with pytest.raises(ConfigError, match="the stages have 3 epochs, but epochs=4"):
        replace(STAGED, epochs=4)
    assert CONFIG.plan.stages == (Stage(30, 120),)
    assert STAGED.plan.stages == STAGED.stages


def test_values_do_not_change():
    with pytest.raises(FrozenInstanceError):
        CONFIG.epochs = 5


def test_plain_data_for_records():
    config = replace(STAGED, rate=RateConfig(rule=lr.linear(3)))
    assert json.loads(json.dumps(plain(config))) == plain(config)
    assert plain(config)["rate"]["rule"] == repr(lr.linear(3))
    assert plain(config)["stages"][1] == {"epochs": 2, "batch": 240, "micro_steps": None}


def test_what_makes_it_the_same_run():
    base = override(CONFIG, {"data.source": "cifar10:/here"})
    for setting in ({"data.source": "cifar10:/there"}, {"data.workers": "3"}, {"log_every": "3"}, {"comm.wire": "float16"}):
        assert identity(plain(override(base, setting))) == identity(plain(base))
    for setting in ({"data.source": "cifar100:/here"}, {"batch": "60"}, {"epochs": "31"}, {"seed": "1"}, {"data.pad": "2"}):
        assert identity(plain(override(base, setting))) != identity(plain(base))


def test_parse_reads_tuples_of_any_length():
    assert parse("[1, 2,3]", tuple[float, ...], "x") == (1.0, 2.0, 3.0)
    assert parse("()", tuple[float, ...], "x") == ()
