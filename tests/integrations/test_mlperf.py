"""MLPerf's own checker passes on the log of an ImageNet-shaped run: ResNet-50, 1,000 classes, LARS, two ranks, target reached.

The task is small, so that it takes a minute, and real: four classes are colours with noise, and some samples belong to others of
the 1,000 classes. A network that learns the colours gets 58 of the 64 test samples right, which is more than MLPerf's 75.9 %.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.world.programs.herd import clean_environment

DEADLINE = 600.0  # seconds
RULES = "4.0.0"  # the last ones that have ResNet-50

RECIPE = '''
from dataclasses import replace

import torch

from phalanx.data.source import Arrays
from phalanx.recipes.imagenet_resnet50_32k import config as mlperf
from phalanx.train.model import BatchNormConfig
from phalanx.train.samples import DataConfig
from phalanx.train.update import CommConfig

COLOURS = torch.tensor([[220.0, 30, 30], [30, 220, 30], [30, 30, 220], [220, 220, 30]])


class Colours(DataConfig):
    """Images of one colour and noise. The first `others` are of any colour, and of a class that has no second sample."""

    def open(self, split):
        draw = torch.Generator().manual_seed(len(split))
        n, others = (160, 10) if split == "train" else (64, 6)
        y = torch.arange(n) % 4
        y[:others] = 4 + torch.randperm(996, generator=draw)[:others]
        colours = torch.where((y < 4)[:, None], COLOURS[y % 4], 255 * torch.rand(n, 3, generator=draw))
        x = colours[:, :, None, None] + 20 * torch.randn(n, 3, 16, 16, generator=draw)
        return Arrays(x.clamp(0, 255).to(torch.uint8), y, tuple(map(str, range(1000))), "colours")


config = replace(
    mlperf,
    name="resnet50-colours",
    epochs=12,
    batch=32,
    micro_batch=8,
    model=replace(mlperf.model, precision="float32", channels_last=False, batchnorm=BatchNormConfig(last_batch=True)),
    data=Colours(mean=mlperf.data.mean, std=mlperf.data.std, flip=True),
    rate=replace(mlperf.rate, peak=1.0, warmup=1, decay_epochs=11.0, end=1e-4),
    optimizer=replace(mlperf.optimizer, momentum=0.9),
    comm=CommConfig(),
    evaluate_every=1,
)
'''


def check(log: Path, ruleset: str = RULES) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "mlperf_logging.compliance_checker", "--ruleset", ruleset, "--werror", log.name],
        cwd=log.parent,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """The log of a run of the command line."""
    pytest.importorskip("mlperf_logging")
    path = tmp_path_factory.mktemp("mlperf")
    (path / "colours.py").write_text(RECIPE)
    submission = {"org": "Phalanx", "status": "research", "cache_clear": "false"}
    words = [word for name, value in submission.items() for word in ("--set", f"submission.{name}={value}")]
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "train", "colours.py", "--ranks", "2", "--out", "run", *words],
        cwd=path,
        env=clean_environment() | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (path / "stdout.txt").write_text(done.stdout)
    return path / "run" / "mllog.txt"


def lines(log):
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in log.read_text().splitlines()]


def test_the_checker_passes(log):
    code, said = check(log)
    assert code == 0, said
    assert "SUCCESS" in said
    last = lines(log)[-1]
    assert (last["key"], last["metadata"]) == ("run_stop", {"status": "success"})
    best = max(line["value"] for line in lines(log) if line["key"] == "eval_accuracy")
    assert 0.759 <= best < 1


def test_the_checker_passes_on_standard_output_too(log):
    """With the progress between the lines."""
    code, said = check(log.parents[1] / "stdout.txt")
    assert code == 0, said


@pytest.mark.parametrize(
    "key",
    ["submission_org", "cache_clear", "gradient_accumulation_steps", "lars_epsilon", "lars_opt_weight_decay", "eval_accuracy"],
)
def test_the_checker_misses_what_is_missing(log, tmp_path, key):
    """The control: without one of the keys it fails."""
    kept = [line for line in log.read_text().splitlines() if json.loads(line.removeprefix(":::MLLOG "))["key"] != key]
    (tmp_path / "cut.txt").write_text("\n".join(kept) + "\n")
    code, said = check(tmp_path / "cut.txt")
    assert code == 1
    assert key in said
