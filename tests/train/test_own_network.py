"""Networks and optimizers of the user's own: what they get, what is refused, and that they train like ours."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tests.train.own_runs import TINY, examine
from tests.train.runs import DIGITS, distance, on_trainer, run, same
from torch.nn import functional as F

import phalanx
from phalanx.optim.one_pass import why_not
from phalanx.train.config import ConfigError, override
from phalanx.train.own_optimizer import TORCH
from phalanx.train.update import OptimizerConfig

pytestmark = pytest.mark.usefixtures("own_things")


# ---- networks ------------------------------------------------------------------------------------------------------------------


def test_a_factory_gets_what_it_asks_for():
    settings = {"model": "own_things:Net", "model.args.width": "5", "model.args.shape": "[8, 8]", "model.args.activation": "tanh"}
    config = examine(settings)
    found = on_trainer(config, 1, lambda trainer: trainer.model)[0]
    assert [found[1].in_features, found[1].out_features, found[3].out_features] == [64, 5, 10]
    assert isinstance(found[2], torch.nn.Tanh)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"model.args.widht": "5"}, r"args.widht=5: own_things:Net has no such parameter \(width\?\); it takes num_classes, "),
        ({"model": "own_things:needy"}, r"model=own_things:needy needs depth: --set model.args.depth=VALUE"),
        ({"model": "own_things:Nett"}, r"model=own_things:Nett: own_things has no Nett \(Net\?\)"),
        ({"model": "own_thing:Net"}, "model=own_thing:Net: there is no module own_thing; modules are found in"),
        ({"model": "own_things.nets:Net"}, "own_things"),
        ({"model": "own_things:NUMBER"}, "it is a int, not a function or class"),
        ({"model": "own_things:not_a_model"}, "gives a int, not a torch.nn.Module"),
        ({"model": "own_things:frozen"}, "has no parameters to train"),
        ({"model": "own_things:raises"}, r"model=own_things:raises: RuntimeError: two lines \(own_things.py, line \d+\)"),
        ({"model": "own_things:wrong_outputs"}, "own_things:wrong_outputs: it gives 1 x 7 for one sample, wanted 1 x 10"),
        ({"model": "own_things:wrong_inputs"}, "does not take images of 1 x 8 x 8: RuntimeError: mat1 and mat2"),
        ({"model": "own_things:", "model.width": "3"}, "one of small_cnn, .* or an import path"),
        ({"model.width": "3"}, "only .* have one, own_things:Net has not: use model.args.width"),
        ({"model": "torchvision:resnet18"}, "needs the package torchvision, which is not installed: pip install torchvision"),
        ({"model": "timm:resnet18"}, "needs the package timm, which is not installed: pip install timm"),
        ({"model": "gpt"}, "model.name=gpt does not take images of 1 x 8 x 8: it takes text"),
    ],
)  # fmt: skip
def test_networks_that_are_refused(settings, told):
    with pytest.raises(ConfigError, match=told) as caught:
        examine(settings)
    assert "\n" not in str(caught.value)


def test_a_factory_that_needs_numbers_is_built_for_real():
    """timm's networks, for example, read numbers while they are made, which the device `meta` has not."""
    state = torch.random.get_rng_state()
    examine({"model": "own_things:counted"})
    assert torch.equal(state, torch.random.get_rng_state())


STAND_INS = {
    "torchvision/__init__.py": "",
    "torchvision/models.py": """
from own_things import Net
def get_model(name, **config):
    assert name == "resnet18", f"Unknown model {name}"
    return Net(**config)
""",
    "timm.py": """
from own_things import Net
def create_model(name, in_chans=3, **config):
    assert name == "vit", name
    return Net(in_channels=in_chans, **config)
""",
}


def test_collections_of_networks_that_are_installed(tmp_path, monkeypatch):
    """Stand-ins: neither package has to be here."""
    for name, text in STAND_INS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        examine({"model": "torchvision:resnet18", "model.args.width": "3"})
        examine({"model": "timm:vit"})
        with pytest.raises(ConfigError, match="model=torchvision:resnet19: AssertionError: Unknown model resnet19"):
            examine({"model": "torchvision:resnet19"})
    finally:
        for name in ("torchvision", "torchvision.models", "timm"):
            sys.modules.pop(name, None)


def test_another_network_begins_without_the_arguments_of_the_first():
    config = override(TINY, {"model.args.width": "5"})
    assert override(config, {"model.args.activation": "tanh"}).model.args == {"width": 5, "activation": "tanh"}
    assert override(config, {"model": "own_things:make_model"}).model.args == {}
    assert override(config, {"model": "own_things:Net"}).model.args == {"width": 5}


# ---- optimizers ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw", "AdamW", "torch.optim:AdamW"])
def test_adamw_has_the_bits_of_a_plain_script(name):
    from own_things import Net

    phalanx.seed_everything(0)
    model = Net(10, width=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.95), weight_decay=0.05)
    normalise = phalanx.data.Normalise(DIGITS.mean, DIGITS.std)
    with phalanx.data.Loader(phalanx.data.open("digits"), batch=120, transform=normalise) as loader:
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
    settings = {"model.args.width": "16", "optimizer": name, "optimizer.args.betas": "[0.8, 0.95]"}
    config = examine(settings | {"optimizer.args.weight_decay": "0.05"})
    assert same(run(config)[1], model.state_dict())
    assert same(run(examine(settings | {"optimizer.weight_decay": "0.05"}))[1], model.state_dict())
    assert not same(run(examine(settings))[1], model.state_dict()), "any run would pass"


@pytest.mark.parametrize("name", sorted(set(TORCH) - {"lbfgs", "sparseadam", "muon"}))
def test_every_optimizer_of_torch_follows_the_rate(name):
    config = examine({"optimizer": name, "rate.decay": "linear", "rate.warmup": "0.5"})

    def act(trainer):
        rates = []
        for step in trainer.loader.steps():
            trainer.update(step, (step.index + 1) / 11, input_seconds=0.0)
            rates.append(float(trainer.optimizer.param_groups[0]["lr"]))
        return rates

    rates = on_trainer(config, 1, act)[0]
    assert rates[0] == pytest.approx(1e-2 * (1 / 11) / 0.5)
    assert max(rates) > rates[-1] > 0


def test_ranks_equal_one_process_with_an_optimizer_of_ones_own():
    for settings in ({"optimizer": "own_things:Lion", "rate.peak": "0.001"}, {"optimizer": "adamw", "micro_batch": "30"}):
        config = examine(settings, ranks=2)
        assert distance(run(config, 2)[1], run(replace(config, micro_batch=None))[1]) < 1e-3
    examine({"optimizer": "own_things:of_options", "optimizer.args.momentum": "0.5"})


def test_weight_decay_and_biases():
    def groups(**options):
        made = OptimizerConfig(**options).build(model)
        return [(len(group["params"]), group["weight_decay"]) for group in made.param_groups]

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    assert groups(name="adamw") == [(4, 0.01)]
    assert groups(name="adamw", weight_decay=0.3) == [(4, 0.3)]
    assert groups(name="adamw", decay_all=False) == [(1, 0.01), (3, 0.0)]
    assert groups(name="adamw", decay_all=False, weight_decay=0.1, args={"weight_decay": 0.2}) == [(1, 0.2), (3, 0.0)]
    assert groups(name="adam") == [(4, 0)]
    assert groups(name="own_things:Lion", decay_all=False, weight_decay=0.1) == [(1, 0.1), (3, 0.0)]
    assert groups() == groups(name="sgd", weight_decay=5e-5) == [(1, 5e-5), (3, 0.0)]


def test_adamw_of_a_run_can_be_fused():
    optimizer = OptimizerConfig(name="adamw").build(torch.nn.Linear(2, 2))
    assert why_not(optimizer, SimpleNamespace(shares_memory=True)) == ""
    assert "not torch.optim.SGD" in why_not(
        OptimizerConfig(name="nadam").build(torch.nn.Linear(2, 2)), SimpleNamespace(shares_memory=True)
    )


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"optimizer": "adamw", "optimizer.args.beta": "1"}, r"args.beta=1: adamw has no such parameter \(betas\?\); it takes "),
        ({"optimizer": "adamw", "optimizer.args.lr": "1"}, "the run sets the learning rate: use rate.peak"),
        ({"optimizer": "adamw", "optimizer.args.betas": "[1.5, 0.9]"}, "optimizer=adamw: ValueError: Invalid beta parameter"),
        ({"optimizer": "rprop", "optimizer.weight_decay": "0.1"}, "rprop has none: --set optimizer.weight_decay=none"),
        ({"optimizer": "own_things:make_model"}, "optimizer"),
        ({"optimizer": "own_things:Lyon"}, r"has no Lyon \(Lion\?\)"),
        ({"optimizer": "own_things:Lion", "optimizer.args.gamma": "1"}, "it takes lr, beta, weight_decay"),
    ],
)  # fmt: skip
def test_optimizers_that_are_refused(settings, told):
    with pytest.raises(ConfigError, match=told) as caught:
        examine(settings)
    assert "\n" not in str(caught.value)
