"""`phalanx train` with comm.elastic: ranks die in training and in an evaluation, rank 0 too, and are replaced."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from tests.long import only_long
from tests.world.elastic_data import network, source

from phalanx.cli.main import main
from phalanx.train.initial_weights import load_initial_weights
from phalanx.train.report.run import read_run
from phalanx.train.rows import read_rows

ROOT = Path(__file__).parents[2]
DEADLINE = 120.0
RECIPE = """
from phalanx.train.config import RunConfig
from phalanx.train.model import ModelConfig
from phalanx.train.samples import DataConfig
from phalanx.train.update import CommConfig, RateConfig
config = RunConfig(
    name="deadly", epochs=EPOCHS, batch=12, model=ModelConfig(name="tests.world.elastic_data:network"),
    data=DataConfig(source="tests.world.elastic_data:source", last="keep", workers=0),
    rate=RateConfig(peak=0.05, decay="constant"), comm=CommConfig(elastic=True, timeout=20.0),
    log_every=3, checkpoint_every_steps=4,
)
"""

pytestmark = pytest.mark.usefixtures("warm_python")


def train(
    directory: Path, *options: str, ranks: int = 3, epochs: int = 3, training: str = "", test: str = ""
) -> subprocess.CompletedProcess[str]:
    recipe = directory / "deadly.py"
    recipe.write_text(RECIPE.replace("EPOCHS", str(epochs)))
    command = [sys.executable, "-m", "phalanx", "train", str(recipe), "--ranks", str(ranks), "--out", str(directory / "run")]
    log = directory / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, *options],
            stdout=out,
            stderr=out,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "DIES_IN_TRAIN": training, "DIES_IN_TEST": test},
        )
        try:
            code = process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            process.wait(40)
            raise AssertionError(f"the run does not end:\n{log.read_text()}") from None
    return subprocess.CompletedProcess(command, code, log.read_text())


def check_rows(directory: Path, epochs: int, steps_per_epoch: int, *, extra: int) -> list[dict]:
    """Every row once: an evaluation per epoch, and an interval at every multiple of 3, of 4, and at the end of an epoch."""
    rows = read_rows(directory / "run" / "metrics.jsonl")
    assert [row["epoch"] for row in rows if row["kind"] == "evaluation"] == list(range(1, epochs + 1))
    at = [row["step"] for row in rows if row["kind"] == "interval"]
    assert at == sorted(set(at)), "a row is there twice, or out of order"
    last = rows[-1]
    assert last["kind"] == "end"
    assert epochs * steps_per_epoch <= last["steps"] <= epochs * steps_per_epoch + extra
    ends = {row["step"] for row in rows if row["kind"] == "evaluation"}
    wanted = {s for s in range(1, last["steps"]) if s % 3 == 0 or s % 4 == 0} | ends
    assert wanted - set(at) <= {s - 1 for s in ends}, "a row is missing"  # the last step but one may have been the last
    return rows


def accuracy(checkpoint: Path) -> float:
    """Of the weights in a checkpoint, in one process."""
    model, data = network(), source("test")
    load_initial_weights(model, str(checkpoint))
    with torch.no_grad():
        return float((model(data.x).argmax(1) == data.y).double().mean())


def test_rank_0_dies_in_training_and_the_next_one_in_an_evaluation(tmp_path):
    epochs = 4
    options = ("--replace", "2", "--set", "comm.min_ranks=3", "--set", "keep=100")
    done = train(tmp_path, *options, epochs=epochs, training="0:21", test="1:16")
    assert done.returncode == 0, done.stdout
    rows = check_rows(tmp_path, epochs, 10, extra=1)
    changes = [row for row in rows if row["kind"] == "membership"]
    assert [[who for who, _ in row["left"]] for row in changes if row["left"]] == [[0], [1]], done.stdout
    assert sorted(who for row in changes for who in row["joined"]) == [3, 4], done.stdout
    for row in changes:  # who, why, how many are left, and for how long all stood still: one line each
        lines = [line for line in done.stdout.splitlines() if line.startswith(f"epoch {row['membership']}: ")]
        assert len(lines) == 1, done.stdout
        assert f"{row['ranks']} rank" in lines[0]
        assert all(f"member {who} was killed by signal 9" in lines[0] for who, _ in row["left"])
    assert rows[-1]["top1"] > 0.9
    for row in rows:  # no evaluation lacks the share of the rank that died in it
        if row["kind"] == "evaluation":
            (found,) = (tmp_path / "run" / "checkpoints").glob(f"step-{row['step']:09}*")
            assert row["top1"] == accuracy(found), done.stdout
    run = read_run(tmp_path / "run", "run")
    assert {int(at) for at, _ in run.events_at("step")} == {row["step"] for row in changes}
    page = (tmp_path / "run" / "report.html").read_text()
    assert "member 0 was killed by signal 9; 2 ranks after step" in page
    assert "Ranks that left and joined" in page


def test_a_run_whose_ranks_all_died_is_resumed(tmp_path):
    died = train(tmp_path, ranks=2, epochs=3, training="0:30+1:100")
    assert died.returncode == 137, died.stdout
    assert "to continue from the last checkpoint: phalanx train" in died.stdout
    done = train(tmp_path, "--resume", ranks=2, epochs=3)
    assert done.returncode == 0, done.stdout
    assert "resumed after step" in done.stdout
    check_rows(tmp_path, 3, 10, extra=1)


@only_long
@pytest.mark.parametrize("seed", range(6))
def test_deaths_at_any_moment(tmp_path, seed):
    """A rank of three dies wherever it happens to be: in a step, in an evaluation, or while a checkpoint is agreed on."""
    chosen = random.Random(seed)
    where = {split: f"{chosen.randrange(3)}:{chosen.randrange(9, most)}" for split, most in (("training", 90), ("test", 25))}
    done = train(tmp_path, "--set", "comm.on_change=keep_share", epochs=3, **where)
    assert done.returncode == 0, done.stdout
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    keys = Counter((row["kind"], row.get("membership" if row["kind"] == "membership" else "step")) for row in rows)
    assert set(keys.values()) == {1}, keys
    assert (rows[-1]["kind"], rows[-1]["epochs"]) == ("end", 3)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["--replace", "3"], "--replace 3 is for ranks that may die: --set comm.elastic=true"),
        (["--set", "comm.min_ranks=2"], "min_ranks, max_ranks and on_change are for elastic=True"),
        (["--set", "comm.elastic=true", "--set", "comm.fused=true"], "elastic=True does not allow fused"),
        (["--set", "comm.elastic=true", "--set", "comm.min_ranks=3", "--set", "comm.max_ranks=2"], "min_ranks=3 is more than"),
        (["--set", "comm.elastic=true", "--set", "model.batchnorm.statistics=shared"], "does not go with comm.elastic"),
    ],
)
def test_settings_that_do_not_go_together(settings, words, capsys):
    assert main(["train", "cifar10", *settings]) == 2
    assert words in capsys.readouterr().err
