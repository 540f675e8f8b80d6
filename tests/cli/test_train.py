"""`phalanx train`: what is mistyped ends with one line and exit code 2; what is right trains, stops, and goes on."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.long import only_long
from tests.train.runs import run as train_on_threads
from tests.world.programs.herd import clean_environment

from phalanx.cli.main import main
from phalanx.cli.train import default_ranks, load, resolve
from phalanx.train.checkpoint.places import find_places
from phalanx.train.checkpoint.read import read
from phalanx.train.config import RunConfig, override, paths
from phalanx.train.rows import read_rows

DEADLINE = 120.0  # seconds for one command, which imports torch in each rank
QUICK = ["--set", "model.width=4", "--set", "rate.warmup=0.5"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---- slips of the finger ------------------------------------------------------------------------------------------------------

FILES = {
    "syntax.py": "config = RunConfig(",
    "empty.py": "",
    "other.py": "config = {'epochs': 3}",
    "broken.py": "import nowhere_to_be_found",
    "wrong.py": "from phalanx.train.config import RunConfig\nconfig = RunConfig(name='x', epochs=0)",
    "unknown.py": "from phalanx.train.config import RunConfig\nconfig = RunConfig(name='x', epoch=1)",
    "a_file": "",
    "earlier/checkpoints/step-000000001/manifest.json": "{}",
    "other_run/config.json": "{}",
}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("digit", "'digit' is neither a recipe nor a file; the recipes are cifar10, "),
        ("missing.py", "neither a recipe nor a file"),
        ("syntax.py", "syntax.py: SyntaxError"),
        ("empty.py", "a recipe has one `config = RunConfig"),
        ("other.py", "this one has dict"),
        ("broken.py", "ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("wrong.py", "epochs=0: at least 1"),
        ("unknown.py", "epoch"),
        ("--set epochs", "--set epochs: give PATH=VALUE"),
        ("--set epoch=3", "there is no such setting (epochs?); there are name, epochs"),
        ("--set optimizer.momentun=0.8", "(optimizer.momentum?)"),
        ("--set rate=0.1", "rate has its own settings: rate.peak"),
        ("--set model=mlp --set model.name=resnet50", "model.name is set twice, also as model: leave one of them out"),
        ("--set epochs=many", "epochs=many: a whole number"),
        ("--set epochs=1.5", "a whole number"),
        ("--set rate.peak=fast", "rate.peak=fast: a number"),
        ("--set optimizer.nesterov=perhaps", "true or false"),
        ("--set optimizer.name=adamz", "one of sgd, lars"),
        ("--set epochs=0", "at least 1"),
        ("--set rate.warmup=30", "warmup=30 epochs, but the run has 24"),
        (
            "--set rate.warmup=1 --set epochs=1",
            "warmup=1 epochs, but the run has 1: use a smaller rate.warmup",
        ),
        ("fashion-mnist-8k --set batch=256", "batch=256 has no effect because the recipe has stages"),
        ("--ranks 3 --set comm.sync=gossip --set comm.gossip.topology=hypercube", "needs a power of two, but there are 3 ranks"),
        ("--set batch=5000", "batch=5000, but data.source=digits has 1437 samples"),
        ("--ranks 2 --set batch=121", "121"),
        ("--ranks 2 --set micro_batch=7", "micro"),
        ("--ranks 0", "--ranks: '0' is not a whole number of at least 1"),
        ("--ranks -3", "--ranks: '-3' is not a whole number of at least 1"),
        ("--ranks 2000 --set batch=2000", "2000 ranks, but data.source=digits has 1437 samples"),
        ("--ranks two", "'two' is not a whole number"),
        ("--set comm.algorithm=rings:2", "'rings:2' is neither a schedule nor a file"),
        ("--set comm.algorithm=torus", "write torus:ROWSxCOLS"),
        ("--ranks 2 --set comm.algorithm=torus:2x2", "comm.algorithm=torus:2x2 is for 4 ranks, but there are 2"),
        ("--ranks 2 --set comm.algorithm=gossip:2", "not the sum of an all-reduce"),
        ("cifar10 --set data.source=cifar10:nowhere", "nowhere"),
        ("--set data.source=cifar11:here", "cifar11"),
        ("imagenet-resnet50 --set data.source=imagefolder:nowhere", "nowhere"),
        ("--set model.name=resnet9 --set data.source=synthetic:1x4x4,classes=10", "resnet9 does not take images of 1 x 4 x 4"),
        ("--set data.mean=0.5,0.5,0.5 --set data.std=1,1,1", "one for each channel"),
        ("--set target=97", "an accuracy, more than 0 and at most 1"),
        ("--resume", "nothing to resume: there is no runs/digits"),
        ("--resume --out other_run", "nothing to resume in other_run: its config.json is not that of a run"),
        ("--resume --out earlier", "earlier has checkpoints, but no config.json"),
        ("--resume --out a_file", "--out a_file"),
        ("--out earlier", "earlier has checkpoints of an earlier run: continue it with --resume"),
        ("--out a_file", "--out a_file"),
        ("--epochs 3", "unrecognized arguments: --epochs"),
    ],
)
def test_a_slip_of_the_finger(here, capsys, words, told):
    for name, text in FILES.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(text)
    assert main(["train", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    said = [line for line in err.splitlines() if not line.startswith(("usage:", " "))]
    assert len(said) == 1
    assert told in said[0]
    assert "Traceback" not in err
    assert not (here / "runs").exists(), "nothing was begun"


def test_a_shorter_run_warms_up_for_the_same_share_of_it():
    assert load("digits").rate.warmup == 3
    assert resolve("digits", ["epochs=2"]).rate.warmup == 3 * 2 / 24
    assert resolve("digits", ["epochs=4"]).rate.warmup == 3
    assert resolve("digits", ["epochs=1", "rate.warmup=0.5"]).rate.warmup == 0.5
    assert resolve("digits", ["epochs=1"]).course


def test_another_run_is_not_resumed(here, capsys):
    run = ["train", "--ranks", "1", "--out", "run", "--set", "epochs=1", *QUICK]
    assert main(run) == 0
    capsys.readouterr()
    assert main([*run, "--resume", "--set", "batch=30"]) == 2
    assert "config.batch: 60 in the checkpoint, 30 here" in capsys.readouterr().err
    assert main([*run, "--resume", "--set", "log_every=3"]) == 0
    assert "resumed after step 23" in capsys.readouterr().out


def test_one_command_line_begins_a_run_and_continues_it(here, capsys):
    """As a scheduler that requeues a job wants it; also where the first start was killed before its first checkpoint."""
    run = ["train", "--ranks", "1", "--out", "new/run", "--resume", "--set", "epochs=1", *QUICK]
    assert main(run) == 0
    assert "no checkpoint yet: starting from the beginning" in capsys.readouterr().out
    assert main(run) == 0
    assert "resumed after step 23" in capsys.readouterr().out
    shutil.rmtree("new/run/checkpoints")
    assert main(run) == 0
    assert "no checkpoint yet: starting from the beginning" in capsys.readouterr().out
    assert [row["step"] for row in read_rows(Path("new/run/metrics.jsonl")) if row["kind"] == "start"] == [0, 0]


# ---- one rank ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cores", "ranks"), [(1, 1), (2, 2), (7, 6), (16, 15), (1000, 120)])
def test_as_many_ranks_as_cores_and_batch_allow(cores, ranks):
    assert default_ranks(RunConfig(name="test", batch=120), cores) == ranks


def test_every_recipe_is_shown_and_can_be_set(capsys):
    for recipe in ("digits", "cifar10", "fashion-mnist", "imagenet-resnet50"):
        assert main(["train", "--show", recipe, "--set", "seed=7"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert f"name={recipe}" in lines
        assert "seed=7" in lines
        assert all("=" in line for line in lines)


def test_every_setting_is_explained(capsys):
    assert main(["train", "--settings"]) == 0
    out = capsys.readouterr().out
    assert "epochs (whole number, default 30)\n    Passes over the training data.\n" in out
    for path, _ in paths(RunConfig(name="run")):
        assert f"{path} (" in out
    assert main(["train", "--help"]) == 0
    assert "\n  phalanx train cifar10 --set data.source=cifar10:DIR --set epochs=5\n" in capsys.readouterr().out


def test_runs_are_numbered_and_the_newest_is_resumed(here, capsys):
    quick = ["train", "--ranks", "1", "--set", "epochs=1", *QUICK]
    assert main(quick) == 0
    assert main(quick) == 0
    assert sorted(path.name for path in (here / "runs").iterdir()) == ["digits", "digits-2"]
    capsys.readouterr()
    assert main([*quick, "--resume"]) == 0
    assert "runs/digits-2" in capsys.readouterr().out
    files = {path.name for path in (here / "runs" / "digits").iterdir()}
    assert {"config.json", "environment.json", "metrics.jsonl", "checkpoints"} <= files
    assert json.loads((here / "runs" / "digits" / "config.json").read_text())["epochs"] == 1


def test_a_run_that_fails_says_why(here, capsys):
    """Not what was typed, but what is there, is wrong."""
    (here / "run").mkdir()
    (here / "run" / "checkpoints").write_text("not a directory")
    assert main(["train", "--ranks", "1", "--out", "run", "--set", "epochs=1", *QUICK]) == 1
    assert re.fullmatch(r"phalanx: rank 0: cannot write in .*checkpoints: .*\n", capsys.readouterr().err)


def test_a_recipe_in_a_file(here, capsys):
    recipe = "from dataclasses import replace\nfrom phalanx.recipes.digits import config\nconfig = replace(config, name='mine')\n"
    (here / "mine.py").write_text(recipe)
    assert main(["train", "mine.py", "--show", "--set", "epochs=3"]) == 0
    assert "name=mine" in capsys.readouterr().out


# ---- several ranks ------------------------------------------------------------------------------------------------------------


def phalanx_train(*words: str, **options: object) -> subprocess.Popen[str]:
    """The command, on ranks that it starts."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-m", "phalanx", "train", *words]
    return subprocess.Popen(command, env=clean_environment() | {"OMP_NUM_THREADS": "1"}, **pipes, **options)


def stopped_after_an_epoch(by: signal.Signals, out: Path, *words: str) -> tuple[str, str]:
    """What two ranks print that get this signal after their first evaluation, and end with its code."""
    with phalanx_train("--ranks", "2", "--out", str(out), *words) as process:
        try:
            began = time.monotonic()
            while not any(row["kind"] == "evaluation" for row in read_rows(out / "metrics.jsonl")):
                assert process.poll() is None
                assert time.monotonic() - began < DEADLINE
                time.sleep(0.02)
            process.send_signal(by)
            printed = process.communicate(timeout=DEADLINE)
        finally:
            process.kill()
    assert process.returncode == 128 + by
    return printed


def weights(out: Path) -> dict[str, list[float]]:
    saved = read(out / "checkpoints", find_places(out / "checkpoints")[0], ["model"]).saved["model"].value
    return {name: x.flatten().tolist() for name, x in saved.items()}


@pytest.mark.usefixtures("warm_python")
@only_long
def test_two_ranks_stopped_by_sigterm_go_on_and_end_as_if_undisturbed(tmp_path):
    """Also under torchrun, whose ranks the command joins."""
    run = ["--set", "epochs=8", "--set", "model.width=8"]
    out, err = stopped_after_an_epoch(signal.SIGTERM, tmp_path / "cut", *run)
    assert "stopped on request; --resume continues" in out
    assert err.startswith("stopping: this step is finished and saved first")
    assert len(err.splitlines()) == 2, err
    step = read_rows(tmp_path / "cut" / "metrics.jsonl")[-1]["steps"]
    assert 23 <= step < 8 * 23
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "phalanx", "train"]
    env = clean_environment() | {"OMP_NUM_THREADS": "1"}
    end = subprocess.run(
        [*torchrun, "--out", str(tmp_path / "cut"), "--resume", *run], env=env, capture_output=True, text=True, timeout=DEADLINE
    )
    assert end.returncode == 0, end.stderr
    assert f"resumed after step {step}" in end.stdout
    assert len(re.findall("resumed after", end.stdout)) == 1, "rank 0 speaks for all"
    undisturbed = train_on_threads(override(load("digits"), dict(setting.split("=") for setting in run[1::2])), 2)[1]
    assert weights(tmp_path / "cut") == {name: x.flatten().tolist() for name, x in undisturbed.items()}


@pytest.mark.usefixtures("warm_python")
def test_ctrl_c_saves_and_says_at_once_how_to_go_on(tmp_path):
    _, err = stopped_after_an_epoch(signal.SIGINT, tmp_path / "cut", "--set", "epochs=500")
    assert f"to continue: phalanx train digits --ranks 2 --resume --out {tmp_path / 'cut'} --set epochs=500" in err
    assert len(err.splitlines()) == 2, err
    step = read_rows(tmp_path / "cut" / "metrics.jsonl")[-1]["steps"]
    assert find_places(tmp_path / "cut" / "checkpoints")[0].step == step


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize("launcher", [False, True])
def test_a_second_ctrl_c_ends_at_once(launcher):
    """torchrun hands on the signal that the terminal has sent already, so there the second one counts after a second."""
    words = f"""
import os, signal, time, phalanx
from phalanx.train import sigterm
comm = phalanx.create_communicator()
if {launcher}:
    os.environ["RANK"] = "0"
with sigterm.StopRequest(comm, "stopping") as stop:
    os.kill(os.getpid(), signal.SIGINT)
    if {launcher}:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(sigterm.SAME + 0.1)
    assert stop.agreed() and stop.signal == signal.SIGINT
    print("heard once", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
"""
    done = subprocess.run(
        [sys.executable, "-c", words], env=clean_environment(), capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert done.returncode == 130
    assert done.stdout == "heard once\n"
    assert done.stderr == "stopping\nended at once, without saving\n"


def test_under_a_launcher_one_rank_speaks(tmp_path, capsys, monkeypatch):
    for rank, lines in ((0, 1), (1, 0)):
        for name, value in {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
            monkeypatch.setenv(name, str(value))
        assert main(["train", "--set", "epochs=none"]) == 2
        assert len(capsys.readouterr().err.splitlines()) == lines
        assert main(["train", "--ranks", "3"]) == 2
        assert capsys.readouterr().err.count("leave --ranks out") == lines
    assert os.listdir(tmp_path) == []
