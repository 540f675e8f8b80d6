"""Runs that start from given weights: from files, from directories of torch, and from runs on another number of ranks."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from tests.train.runs import TINY, on_trainer
from tests.train.runs import run as train_on_threads

from phalanx.cli.main import main
from phalanx.train.checkpoint import CheckpointError
from phalanx.train.config import ConfigError, identity, plain
from phalanx.train.initial_weights import check_init, load_initial_weights, read_weights
from phalanx.train.trainer import train


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    """A run on 3 ranks, and its weights in every form that is read."""
    path = tmp_path_factory.mktemp("origin")
    _, weights = train_on_threads(TINY, 3, path / "run")[:2]
    save_file(weights, path / "model.safetensors")
    torch.save(weights, path / "model.pt")
    torch.save({"epoch": 3, "model": {f"module.{name}": x for name, x in weights.items()}}, path / "ddp.pth")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": weights, "step": 3}, checkpoint_id=path / "torch")
        dcp.save(weights, checkpoint_id=path / "bare")
    assert main(["export", str(path / "run"), "--dcp", str(path / "ours")]) == 0
    return path, weights


FORMS = ["run", "run/checkpoints", "model.safetensors", "model.pt", "ddp.pth", "torch", "bare", "ours"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_starts_from_them_bit_for_bit(origin, form, ranks):
    path, weights = origin
    config = replace(TINY, init=str(path / form), seed=9)

    def act(trainer):
        load_initial_weights(trainer.model, config.init)
        return {name: x.clone() for name, x in trainer.model.state_dict().items()}

    for own in on_trainer(config, ranks, act):
        assert own.keys() == weights.keys()
        assert all(torch.equal(own[name], x) for name, x in weights.items())


def test_the_first_step_is_taken_from_them_and_a_resumed_run_does_not_read_them_again(origin, tmp_path, comm):
    path, weights = origin
    (tmp_path / "copy.pt").write_bytes((path / "model.pt").read_bytes())
    config = replace(TINY, init=str(tmp_path / "copy.pt"), rate=replace(TINY.rate, peak=1e-12, warmup=0.0), epochs=1)
    train(config, comm, out=tmp_path / "run", show=False)
    found = read_weights(tmp_path / "run")
    assert all(torch.allclose(found[name].float(), x.float(), atol=1e-6) for name, x in weights.items()), "the rate is 1e-12"
    torch.save({name: torch.zeros_like(x) for name, x in weights.items()}, tmp_path / "copy.pt")
    train(config, comm, out=tmp_path / "run", resume=True, show=False)
    again = read_weights(tmp_path / "run")
    assert all(torch.equal(again[name], x) for name, x in found.items())


def test_what_is_wrong_is_named(origin, tmp_path, capsys):
    path, _ = origin
    model = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"(?s)another model; the differences:.*model.weight: only here"):
        load_initial_weights(model, str(path / "model.pt"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.pt").write_text("no weights")
    (tmp_path / "text.safetensors").write_text("no weights")
    torch.save({"epoch": 3}, tmp_path / "other.pt")
    for name, words in (("nowhere", "no such file or directory"), ("empty", "there is no checkpoint")):
        with pytest.raises(ConfigError, match=words):
            check_init(str(tmp_path / name))
    for name, words in (("text.pt", "not a torch.save file"), ("text.safetensors", "text"), ("other.pt", "no state dict")):
        check_init(str(tmp_path / name))
        with pytest.raises(CheckpointError, match=words):
            read_weights(tmp_path / name)
    assert main(["train", "--ranks", "1", "--out", str(tmp_path / "run"), "--set", "init=nowhere"]) == 2
    assert "init=nowhere: there is no such file or directory" in capsys.readouterr().err


def test_a_run_without_them_is_the_run_that_it_was():
    """config.json of an earlier version has no such setting."""
    before = {name: value for name, value in plain(TINY).items() if name != "init"}
    assert identity(before) == identity(plain(TINY)) != identity(plain(replace(TINY, init="model.pt")))
