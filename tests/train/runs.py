"""Small runs of the trainer, on ranks that are threads: their results and weights, undisturbed, interrupted and resumed."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import phalanx
from phalanx.train.checkpoint import Checkpointer
from phalanx.train.config import RunConfig, identity, plain
from phalanx.train.log import Log
from phalanx.train.model import ModelConfig
from phalanx.train.rows import read_rows
from phalanx.train.samples import DataConfig
from phalanx.train.trainer import Result, Trainer, assemble
from phalanx.train.update import OptimizerConfig, RateConfig

DIGITS = DataConfig(source="digits", mean=(0.0192,), std=(0.0236,))
TINY = RunConfig(
    name="tiny",
    epochs=2,
    batch=120,
    model=ModelConfig(width=4),
    data=DIGITS,
    optimizer=OptimizerConfig(nesterov=True),
    rate=RateConfig(peak=0.05, warmup=0.5),
)


class InterruptedRunError(RuntimeError):
    """Raised in the middle of a run."""


class Interrupting(Log):
    """A log that ends the run on rank 0 after step `at`."""

    at = 0

    def step(self, *, number: int, **noted: Any) -> None:
        super().step(number=number, **noted)
        if number == self.at and self.comm.rank == 0:
            raise InterruptedRunError


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in model.state_dict().items()}


def play(
    comm: phalanx.Communicator, config: RunConfig, out: Path | None = None, *, resume: bool = False, interrupt: int = 0
) -> tuple[Result, dict[str, torch.Tensor]]:
    """`phalanx.train.trainer.train`, which shows nothing, may be interrupted after a step, and returns the weights as well."""
    Interrupting.at = interrupt
    with Interrupting(config, comm, out, resume=resume, show=False) as log:
        trainer = assemble(config, comm, log)
        checkpoints = nullcontext() if out is None else Checkpointer(out / "checkpoints", comm, config=identity(plain(config)))
        with trainer.loader, trainer.test, checkpoints as saved:
            result = trainer.run(saved, resume=resume)
        return result, weights(trainer.model)


def run(config: RunConfig, ranks: int = 1, out: Path | None = None, **options: Any) -> tuple[Result, dict[str, torch.Tensor]]:
    """What all ranks end with, which is the same."""
    algorithm = options.pop("algorithm", None)
    results = phalanx.run_local(ranks, lambda comm: play(comm, config, out, **options), algorithm=algorithm)
    assert all(dataclasses.replace(own[0], seconds=0) == dataclasses.replace(results[0][0], seconds=0) for own in results)
    assert all(same(own[1], results[0][1]) for own in results)
    return results[0]


def on_trainer(config: RunConfig, ranks: int, act: Any) -> list[Any]:
    """What `act(trainer)` returns on each rank, of a run that has not begun."""

    def own(comm: phalanx.Communicator) -> Any:
        with Log(config, comm, None, resume=False, show=False) as log:
            trainer: Trainer = assemble(config, comm, log)
            with trainer.loader, trainer.test:
                return act(trainer)

    return phalanx.run_local(ranks, own)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Bit by bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def rows(out: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_rows(out / "metrics.jsonl") if row["kind"] == kind]
