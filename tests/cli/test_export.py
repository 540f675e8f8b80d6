"""`phalanx export`: files that plain PyTorch and safetensors read, and directories, from the newest intact checkpoint."""

import os
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from tests.train.runs import TINY
from tests.train.runs import run as train_on_threads

import phalanx
from phalanx.cli.main import main


@pytest.fixture
def run(tmp_path):
    """A run with checkpoints of steps 1 and 2, in which every rank has a replica of its own."""

    def play(comm):
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
        with phalanx.Checkpointer(tmp_path / "run" / "checkpoints", comm) as checkpoints:
            for step in (1, 2):
                with torch.no_grad():
                    model[0].weight.fill_(10 * step + comm.rank)
                checkpoints.save(step, model=model, other={"a": 1})

    phalanx.run_local(2, play)
    return tmp_path / "run"


def read(path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    model.load_state_dict(torch.load(path, weights_only=True))
    return model[0].weight.unique().tolist()


@pytest.mark.parametrize(
    ("where", "rank", "value"),
    [("", None, 20), ("checkpoints", "0", 20), ("checkpoints", "1", 21), ("checkpoints/step-000000001", None, 10)],
)
def test_plain_torch_reads_it(run, tmp_path, capsys, where, rank, value):
    options = ["--rank", rank] if rank else []
    assert main(["export", str(run / where), str(tmp_path / "model.pt"), *options]) == 0
    assert read(tmp_path / "model.pt") == [value]
    assert f"rank {rank or 0} of 2" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(("rank", "value"), [("0", 20), ("1", 21)])
def test_safetensors(run, tmp_path, rank, value):
    path = tmp_path / "model.safetensors"
    assert main(["export", str(run), str(path), "--rank", rank]) == 0
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    model.load_state_dict(load_file(path))
    assert model[0].weight.unique().tolist() == [value]
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}, "as Hugging Face wants it"
    (tmp_path / "plain").touch()
    assert os.stat(path).st_mode == os.stat(tmp_path / "plain").st_mode, "the umask decides who may read it"
    assert not list(tmp_path.glob("*.part"))


def test_tied_weights_are_stored_under_each_name(tmp_path):
    def play(comm):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        model[1].weight = model[0].weight
        with phalanx.Checkpointer(tmp_path / "c", comm) as checkpoints:
            checkpoints.save(1, model=model)

    phalanx.run_local(1, play)
    assert main(["export", str(tmp_path / "c"), str(tmp_path / "m.safetensors")]) == 0
    found = load_file(tmp_path / "m.safetensors")
    assert torch.equal(found["0.weight"], found["1.weight"])
    assert len(found) == 4


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_directory_that_torch_reads_bit_for_bit(tmp_path, capsys, ranks):
    """Model, optimizer and position of a run on some ranks, read by one process of plain torch."""
    _, weights = train_on_threads(TINY, ranks, tmp_path / "run")[:2]
    capsys.readouterr()
    assert main(["export", str(tmp_path / "run"), "--dcp", str(tmp_path / "d")]) == 0
    assert "model, optimizer, position" in capsys.readouterr().out
    state = {"model": {name: torch.empty_like(x) for name, x in weights.items()}, "position": {"step": 0, "epoch": 0}}
    momenta = {name: {"momentum_buffer": torch.zeros_like(x)} for name, x in weights.items()}
    state["optimizer"] = {"state": momenta}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=tmp_path / "d")
    assert all(torch.equal(state["model"][name], x) for name, x in weights.items())
    assert state["position"]["epoch"] == TINY.epochs
    assert all(own["momentum_buffer"].any() for own in state["optimizer"]["state"].values())
    assert main(["export", str(tmp_path / "run"), "--dcp", str(tmp_path / "d")]) == 1
    assert "exists and is not empty" in capsys.readouterr().err


def test_a_damaged_one_is_passed_over_and_named(run, tmp_path, capsys):
    newest = run / "checkpoints" / "step-000000002"
    (newest / "rank-00001.safetensors").unlink()
    assert main(["export", str(run), str(tmp_path / "model.pt")]) == 0
    assert read(tmp_path / "model.pt") == [10]
    assert "step-000000002/rank-00001.safetensors: No such file" in capsys.readouterr().err
    assert main(["export", str(newest), str(tmp_path / "other.pt")]) == 1
    assert not (tmp_path / "other.pt").exists()


@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        (["nowhere", "model.pt"], 2, "No such file"),
        ([".", "model.pt"], 2, "there is no checkpoint"),
        (["run", "model.pt", "--rank", "2"], 2, "saved by ranks 0 to 1"),
        (["run", "missing/model.pt"], 1, "cannot write"),
        (["run"], 2, "name a FILE to write, or a directory with --dcp DIR"),
        (["run", "model.pt", "--dcp", "d"], 2, "name a FILE to write, or a directory"),
        (["run", "--dcp", "missing/deep/d"], 0, ""),
        (["run", "missing/model.safetensors"], 1, "cannot write"),
    ],
)
def test_mistakes(run, tmp_path, capsys, monkeypatch, options, code, told):
    monkeypatch.chdir(tmp_path)
    assert main(["export", *options]) == code
    assert told in capsys.readouterr().err


def test_a_checkpoint_without_a_model(tmp_path, capsys):
    def play(comm):
        with phalanx.Checkpointer(tmp_path / "c", comm) as checkpoints:
            checkpoints.save(1, net={"a": 1})

    phalanx.run_local(1, play)
    assert main(["export", str(tmp_path / "c"), str(tmp_path / "m.pt")]) == 2
    assert "has no 'model'; it has net" in capsys.readouterr().err
