"""Losses, data and tasks of the user's own, and what the records of a run hold of them: text that nothing executes."""

import json
import sys
import textwrap
from dataclasses import replace

import pytest
from tests.train.own_runs import TINY, examine
from tests.train.runs import InterruptedRunError, rows, run, same
from torch.nn import functional as F

from phalanx.cli.main import main
from phalanx.train.config import ConfigError, identity, override, plain, texts
from phalanx.train.task import Metric, Task

pytestmark = pytest.mark.usefixtures("own_things")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory. `phalanx train` makes it importable, which ends with the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("local_things", "helper_nets", "my_recipe"):
        sys.modules.pop(name, None)


# ---- losses, data, tasks -----------------------------------------------------------------------------------------------------


def test_a_loss_of_ones_own_trains_and_is_reported(here):
    usual = examine({"optimizer": "adamw", "epochs": "3"})
    config = examine({"loss": "own_things:focal", "loss.args.gamma": "3"}, usual)
    result, weights = run(config, 2, here / "run")
    plain_result, plain_weights = run(usual, 2)
    assert not same(weights, plain_weights)
    last = rows(here / "run", "evaluation")[-1]
    assert result.top1 == last["top1"] > 0.5
    assert last["loss"] < 0.8 * plain_result.loss, "focal losses are smaller"
    examine({"loss": "own_things:Weighted", "loss.args.first": "3"})
    examine({"loss": "torch.nn:CrossEntropyLoss", "loss.args.label_smoothing": "0.1"})
    with pytest.raises(ConfigError, match="has parameters, which nothing would train"):
        examine({"loss": "own_things:Weighted", "loss.args.learned": "true"})
    with pytest.raises(
        ConfigError, match=r"loss.args.gama=3: own_things:focal has no such parameter \(gamma\?\); it takes gamma"
    ):
        examine({"loss": "own_things:focal", "loss.args.gama": "3"})


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("own_things:per_sample", r"gives a tensor of \(2,\) for outputs and labels: return their mean loss"),
        ("own_things:without_gradient", "gives a loss without a gradient"),
        ("builtins:print", "gives a NoneType for outputs and labels"),
        ("builtins:divmod", "loss=builtins:divmod: TypeError"),
        ("own_things:NUMBER", "it is a int, not a function or class"),
    ],
)
def test_losses_that_are_refused(name, told):
    with pytest.raises(ConfigError, match=told) as caught:
        examine({"loss": name})
    assert "\n" not in str(caught.value)


def test_data_of_ones_own_and_a_task_of_ones_own(here):
    settings = {"model": "own_things:linear", "data": "own_things:make_source", "data.args.n": "480"}
    config = examine(settings | {"task": "own_things:REGRESSION", "rate.peak": "0.1", "target": "0.2", "epochs": "20"})
    assert config.find_task() == override(config, {"task": "own_things:make_task"}).find_task()
    result, _ = run(config, 3, here / "run")
    assert result.why == "target"
    assert result.found["worst"] <= 0.2
    assert "points_per_second" in rows(here / "run", "interval")[-1]
    assert main(["report", "run"]) == 0
    page = (here / "run" / "report.html").read_text()
    for words in ("Worst error over epochs", "Points per second", "mean error"):
        assert words in page
    assert "Accuracy" not in page
    plainly = examine(settings | {"task": "regression", "epochs": "4"})
    assert run(plainly)[0].loss < 1.0


def test_tensors_tell_their_classes():
    examine({"data": "own_things:digits"})
    with pytest.raises(ConfigError, match="does not take samples of 2"):
        examine({"data": "own_things:tensors"})
    linear = {"model": "torch.nn:Linear", "model.args.in_features": "2", "model.args.out_features": "3"}
    found = examine({"data": "own_things:tensors", "batch": "24", "epochs": "5", "rate.peak": "0.1"} | linear)
    assert run(found, 2)[0].top1 > 0.5


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"data": "own_things:endless"}, "gives a list_iterator: return a data set with a length"),
        ({"data": "own_things:empty"}, "data.source=own_things:empty has no samples to test"),
        ({"data": "own_things:make_source"}, "has no `classes`: give your source their names"),
        ({"data": "own_things:make_source", "data.args.m": "3"}, "has no such parameter; it takes n"),
        (
            {"data": "own_things:make_source", "data.flip": "true", "task": "regression", "model": "own_things:linear"},
            "data.flip=True is for images",
        ),
        ({"data": "nowhere:make_source"}, "neither a source nor a module is called 'nowhere'; the sources are digits, "),
        ({"task": "language"}, "task=language|wanted|takes text"),
        ({"task": "own_things:Net"}, "task=own_things:Net"),
        ({"task": "own_things:NUMBER"}, "is a int, not a phalanx.train.task.Task"),
    ],
)  # fmt: skip
def test_data_and_tasks_that_are_refused(settings, told):
    with pytest.raises(ConfigError, match=told) as caught:
        examine(settings)
    assert "\n" not in str(caught.value)


def test_a_task_needs_a_metric():
    with pytest.raises(ValueError, match="at least one Metric"):
        Task(name="x", loss=F.mse_loss, measure=dict, metrics=())
    assert not Task(name="x", loss=F.mse_loss, measure=dict, metrics=(Metric("a", "b"),)).reached(0.5, {}), "not evaluated yet"


# ---- records -----------------------------------------------------------------------------------------------------------------


def test_everything_is_text_in_the_records_and_resumes(here):
    settings = {"model.args.width": "6", "optimizer": "adamw", "optimizer.args.betas": "[0.8, 0.9]", "loss": "own_things:focal"}
    config = examine(settings)
    assert json.loads(json.dumps(plain(config))) == plain(config)
    assert (
        override(TINY, {path: text for path, text in texts(config) if path.startswith(("model", "optimizer", "loss"))}) == config
    )
    assert identity(plain(config)) != identity(plain(override(config, {"model.args.width": "7"})))
    assert identity(plain(config)) != identity(plain(override(config, {"data": "own_things:digits"})))
    whole = run(config, 2)
    with pytest.raises(InterruptedRunError):
        run(replace(config, checkpoint_every_steps=3), 2, here / "cut", interrupt=16)
    result, weights = run(replace(config, checkpoint_every_steps=3), 2, here / "cut", resume=True)
    assert same(weights, whole[1])
    assert result.found == whole[0].found


def test_no_file_that_is_read_runs_an_import_path(here, capsys):
    """A report, an export and a refused resume see the import paths of a run as text."""
    (here / "local_things.py").write_text("from own_things import Lion, digits, focal, make_model\n")
    usual = {"epochs": "1", "rate.warmup": "0", "label_smoothing": "0", "optimizer.weight_decay": "none"}
    things = {"model": "make_model", "optimizer": "Lion", "loss": "focal", "data": "digits"}

    def train(*more, **settings):
        words = (word for name, value in settings.items() for word in ("--set", f"{name}={value}"))
        return main(["train", "--ranks", "1", "--out", "run", *words, *more])

    assert train(**usual, **{name: f"local_things:{value}" for name, value in things.items()}) == 0
    del sys.modules["local_things"]
    (here / "local_things.py").write_text("open('was-run', 'w')\nraise SystemExit")
    assert main(["report", "run"]) == 0
    assert main(["export", "run", "model.pt"]) == 0
    capsys.readouterr()
    assert train("--resume", **usual) == 2
    assert "local_things:make_model" in capsys.readouterr().err
    assert not (here / "was-run").exists()
    assert train("--resume", **usual, model="local_things:make_model") == 2
    assert (here / "was-run").exists(), "a negative control: here the user asked for it"


def test_a_recipe_finds_what_lies_beside_it(here, capsys):
    (here / "beside").mkdir()
    (here / "beside" / "helper_nets.py").write_text("from own_things import make_model\n")
    recipe = """
    from helper_nets import make_model as make
    from phalanx.recipes.digits import config as digits
    from dataclasses import replace
    from phalanx.train.model import ModelConfig
    from phalanx.train.update import RateConfig
    def build(num_classes): return make(num_classes=num_classes)
    config = replace(digits, name="mine", epochs=1, rate=RateConfig(), model=ModelConfig(name="my_recipe:build"))
    """
    (here / "beside" / "my_recipe.py").write_text(textwrap.dedent(recipe))
    assert main(["train", "beside/my_recipe.py", "--ranks", "1", "--out", "run"]) == 0
    assert "done: test accuracy" in capsys.readouterr().out
