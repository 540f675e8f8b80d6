"""`phalanx export`: a file that plain PyTorch reads, from the newest intact checkpoint."""

import pytest
import torch

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
        (["run"], 2, "FILE"),
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
