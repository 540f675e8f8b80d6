"""Training on real processes that are killed: resumed, it ends bit for bit as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.long import often, only_long
from tests.train.runs import TINY, Interrupting, distance, play, rows, same, weights
from tests.world.conftest import Pools
from tests.world.pool import Pool, WorldError

import phalanx
from phalanx.train.config import RunConfig
from phalanx.train.log import Log
from phalanx.train.model import ModelConfig, Precision
from phalanx.train.trainer import assemble
from phalanx.train.update import CommConfig

CONFIG = replace(TINY, epochs=6, model=ModelConfig(width=8), checkpoint_every_steps=3)


def train(comm: phalanx.Communicator, config: RunConfig, out: Path, resume: bool = False) -> dict[str, torch.Tensor]:
    return play(comm, config, out, resume=resume)[1]


def train_and_die(comm: phalanx.Communicator, config: RunConfig, out: Path, victim: int, seconds: float) -> None:
    """Rank `victim` is killed some time after training has begun, whatever it is doing then."""
    begin = Interrupting.begin

    def begin_to_die(log: Interrupting, step: int, before: float) -> None:
        begin(log, step, before)
        if comm.rank == victim:
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()

    Interrupting.begin = begin_to_die  # the process has not long to live
    play(comm, config, out, resume=(out / "metrics.jsonl").exists())


def train_and_die_at(comm: phalanx.Communicator, config: RunConfig, out: Path, step: int) -> None:
    """Rank 1 is killed after a step."""
    note = Interrupting.step

    def step_to_death(log: Interrupting, *, number: int, **noted: object) -> None:
        note(log, number=number, **noted)
        if comm.rank == 1 and number == step:
            os.kill(os.getpid(), signal.SIGKILL)

    Interrupting.step = step_to_death
    play(comm, config, out)


@only_long
def test_killed_at_random_moments_and_resumed(pair: Pool, tmp_path: Path) -> None:
    whole = pair.run(train, CONFIG, tmp_path / "whole")[0]
    generator, out = random.Random(5), tmp_path / "cut"
    for victim in (1, 0):
        with pytest.raises(WorldError, match="exit code -9"):
            pair.run(train_and_die, CONFIG, out, victim, generator.uniform(0.05, 0.3))
    assert 1 <= len(rows(out, "start")) <= 2
    assert all(same(own, whole) for own in pair.run(train, CONFIG, out, True))


@pytest.mark.parametrize("fused", [True, *often(False)])
def test_one_replica_on_the_host(pair: Pool, tmp_path: Path, fused: bool) -> None:
    """A resumed run has to move into the memory of all ranks anew; its steps are the same ones."""
    large = ModelConfig(width=40)
    config = replace(CONFIG, epochs=1, batch=240, model=large, comm=CommConfig(fused=fused), rate=replace(TINY.rate, warmup=0.0))
    whole = pair.run(train, config, tmp_path / "whole")[0]
    with pytest.raises(WorldError, match="exit code -9"):
        pair.run(train_and_die_at, config, tmp_path / "cut", 4)
    assert all(same(own, whole) for own in pair.run(train, config, tmp_path / "cut", True))
    assert [row["step"] for row in rows(tmp_path / "cut", "start")] == [0, 3]


# ---- 16 bits -------------------------------------------------------------------------------------------------------------------


# virtual machines may have AMX in their list of features but not its tiles, and torch's 16-bit products end with SIGILL there
WITHOUT_TILES = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}


@pytest.mark.parametrize("precision", ["bfloat16", *often("float16")])
def test_precision(pools: Pools, tmp_path: Path, precision: Precision) -> None:
    """Near one process of the same precision, and of float32; killed and resumed, the same bit for bit."""
    pair, one = pools.of(2, **WITHOUT_TILES), pools.of(1, **WITHOUT_TILES)
    config = replace(TINY, model=ModelConfig(width=4, precision=precision), checkpoint_every_steps=4)
    whole = pair.run(train, config, tmp_path / "whole")
    assert same(*whole)
    assert distance(whole[0], one.run(train, config, tmp_path / "one")[0]) < 0.03
    exact = replace(config, model=ModelConfig(width=4))
    off = distance(whole[0], one.run(train, exact, tmp_path / "exact")[0])
    assert 0 < off < 0.03, "nothing was computed in 16 bits"
    with pytest.raises(WorldError, match="exit code -9"):
        pair.run(train_and_die_at, config, tmp_path / "cut", 6)
    assert same(pair.run(train, config, tmp_path / "cut", True)[0], whole[0])


def overflow(comm: phalanx.Communicator) -> tuple[bool, float, list[float]]:
    """Three steps with a scale that is too large for float16."""
    config = replace(TINY, model=ModelConfig(width=4, precision="float16"))
    with Log(config, comm, None, resume=False, show=False) as log:
        trainer = assemble(config, comm, log)
        before = weights(trainer.model)
        trainer.scaler.scale(torch.ones(()))  # makes the scale
        trainer.scaler.update(2.0**60)
        with trainer.loader, trainer.test:
            for _, step in zip(range(3), trainer.loader.steps()):
                trainer.update(step, 0.1, input_seconds=0.0)
        return (
            same(before, weights(trainer.model)),
            trainer.scaler.get_scale(),
            [float(x.sum()) for x in weights(trainer.model).values()],
        )


def test_an_overflow_makes_all_ranks_skip_the_step(pools: Pools) -> None:
    told = pools.of(2, **WITHOUT_TILES).run(overflow)
    assert told[0] == told[1]
    skipped, scale, _ = told[0]
    assert skipped
    assert scale == 2.0**57
