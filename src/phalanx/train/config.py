"""A training run as a value: a recipe is a Python file with one `config = RunConfig(...)`.

Every part is a frozen dataclass next to the code it configures, and every field has a sentence there. `describe_settings` builds
the reference from them, and `override` changes values by name, as `--set model.depth=32` does.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.data import BatchPlan, Stage
from phalanx.optim import lr
from phalanx.train.course import Course
from phalanx.train.import_path import check_import_path
from phalanx.train.loss import LossConfig, find_task
from phalanx.train.model import ModelConfig
from phalanx.train.own_source import is_own_source
from phalanx.train.samples import DataConfig
from phalanx.train.setting_text import ConfigError, parse
from phalanx.train.settings import REQUIRED, Setting, describe, override, paths, setting, texts
from phalanx.train.submission import SubmissionConfig
from phalanx.train.task import Task
from phalanx.train.tasks import TASKS
from phalanx.train.update import CommConfig, OptimizerConfig, RateConfig

__all__ = ["ConfigError", "RunConfig", "Setting", "describe_settings", "identity", "override", "parse", "paths", "plain", "texts"]

STAGE = {
    "epochs": "Epochs of stage N; the first stage is 0.",
    "batch": "Samples per update in stage N, over all ranks.",
    "micro_steps": "Backward passes per update and rank in stage N; none for as many as `micro_batch` needs, else 1.",
}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A training run."""

    name: str = setting(REQUIRED, "Name of the run, and of its directory in runs/.")
    epochs: int = setting(30, "Passes over the training data.")
    batch: int = setting(120, "Samples per update, over all ranks.")
    stages: tuple[Stage, ...] = setting(
        (), "Batch sizes that change during the run; they replace `batch`, and their epochs add up to `epochs`.", parts=STAGE
    )
    micro_batch: int | None = setting(
        None, "Most samples in one backward pass on one rank; larger batches accumulate gradients. None for no limit."
    )
    task: str = setting("classification", "What is learned; an import path names your own `Task`.", names=TASKS)
    model: ModelConfig = setting(ModelConfig(), "The network.")
    data: DataConfig = setting(DataConfig(), "The training and test data.")
    optimizer: OptimizerConfig = setting(OptimizerConfig(), "The update rule.")
    rate: RateConfig = setting(RateConfig(), "The learning rate.")
    comm: CommConfig = setting(CommConfig(), "How ranks communicate.")
    loss: LossConfig = setting(LossConfig(), "Your own loss.")
    label_smoothing: float = setting(0.0, "Share of the target that is spread evenly over all classes, from 0 to less than 1.")
    init: str | None = setting(
        None,
        "Weights to start from: a .safetensors or torch.save file, a directory of torch.distributed.checkpoint, or a run. "
        "None for random ones.",
    )
    seed: int = setting(0, "Seed of the initial weights, of the order of samples and of their augmentation.")
    evaluate_every: int = setting(1, "Epochs between two evaluations; the last epoch always has one.")
    target: float | None = setting(
        None,
        "Result at which the run ends early: top-1 accuracy, from 0 to 1, or the loss if the task is not classification. "
        "None to train all epochs.",
    )
    checkpoint_every: int = setting(1, "Epochs between two checkpoints.")
    checkpoint_every_steps: int | None = setting(
        None,
        "Steps between two checkpoints within an epoch, for epochs too long to lose; none for checkpoints after epochs only.",
    )
    keep: int = setting(3, "How many of the newest checkpoints to keep.")
    log_every: int = setting(10, "Steps between two rows of the log.")
    trace_steps: int = setting(3, "Steps of the second epoch that the report draws as a timeline; 0 for none.")
    mllog: bool = setting(False, "Write MLPerf's log, on standard output and in mllog.txt beside the records.")
    submission: SubmissionConfig = setting(SubmissionConfig(), "What MLPerf asks of a submission besides the run.")
    tensorboard: bool = setting(False, "Write TensorBoard files beside the records; this needs the package tensorboard.")
    wandb: str | None = setting(None, "Project of Weights & Biases, or ENTITY/PROJECT, that gets the rows; none for no such log.")
    mlflow: str | None = setting(
        None, "Where MLflow keeps runs, such as https://HOST, sqlite:///FILE or file:DIR; none for no such log."
    )

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "evaluate_every", "checkpoint_every", "keep", "log_every"):
            _at_least(1, name, getattr(self, name))
        for name in ("micro_batch", "checkpoint_every_steps"):
            if getattr(self, name) is not None:
                _at_least(1, name, getattr(self, name))
        _at_least(0, "trace_steps", self.trace_steps)
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed={self.seed}: from 0 to 2**32 - 1")
        if self.task not in TASKS:
            try:
                check_import_path(self.task, ", ".join(TASKS))
            except ValueError as error:
                raise ConfigError(f"task={self.task}: {error}") from None
        if self.target is not None and self.task == "classification" and not 0 < self.target <= 1:
            raise ConfigError(f"target={self.target}: an accuracy, more than 0 and at most 1")
        if not 0 <= self.label_smoothing < 1:
            raise ConfigError(f"label_smoothing={self.label_smoothing}: from 0 to less than 1")
        if self.label_smoothing and (self.loss.name is not None or self.task not in ("classification", "language")):
            raise ConfigError(
                f"label_smoothing={self.label_smoothing} is for the losses of classification and language: set it to 0"
            )
        if self.stages and sum(stage.epochs for stage in self.stages) != self.epochs:
            total = sum(stage.epochs for stage in self.stages)
            raise ConfigError(f"the stages have {total} epochs, but epochs={self.epochs}: make them equal")
        if self.comm.double_buffering and self.model.precision == "float16":
            raise ConfigError(
                "comm.double_buffering applies the gradients of the step before, but model.precision=float16 unscales them with "
                "the present scale: use model.precision=bfloat16"
            )
        if self.comm.fused and self.data.on_bad == "skip":
            raise ConfigError(
                "comm.fused=True needs equally many samples on all ranks, but data.on_bad=skip may skip some: use on_bad=error"
            )
        if self.comm.fused and self.data.last == "keep":
            raise ConfigError(
                "comm.fused=True needs equally many samples on all ranks, which data.last=keep cannot promise: use drop or pad"
            )
        if self.model.batchnorm.statistics == "shared" and self.uneven:
            raise ConfigError(
                "model.batchnorm.statistics=shared needs samples on all ranks in every step: "
                "use data.on_bad=error, and data.last=drop or pad"
            )

        if self.comm.sync in ("local-sgd", "diloco") and self.comm.local.start and self.uneven:
            raise ConfigError(
                "comm.local.start needs equally many samples on all ranks: use data.on_bad=error, and data.last=drop or pad"
            )
        if self.comm.elastic and self.model.batchnorm.statistics == "shared":
            raise ConfigError("model.batchnorm.statistics=shared does not go with comm.elastic: ranks may die in a layer")

    @property
    def plan(self) -> BatchPlan:
        return BatchPlan(self.stages or (Stage(self.epochs, self.batch),))

    @property
    def course(self) -> Course:
        """Rate, momentum and batch of every step. ValueError if they contradict each other."""
        return Course(self.plan, self.rate, self.optimizer)

    def find_task(self, device: torch.device | None = None) -> Task:
        """The task, with the user's loss if there is one. ConfigError if an import path does not resolve."""
        return find_task(self.task, self.loss, self.label_smoothing, device)

    @property
    def uneven(self) -> bool:
        """Whether the number of samples in a step may differ between ranks."""
        return self.data.on_bad == "skip" or self.data.last == "keep"


def _at_least(least: int, name: str, value: int) -> None:
    if not isinstance(value, int):
        raise ConfigError(f"{name}={value!r}: a whole number")
    if value < least:
        raise ConfigError(f"{name}={value}: at least {least}")


def describe_settings() -> list[Setting]:
    """List every setting of `phalanx train --set`: its name, type, default and meaning.

    Example:
        >>> describe_settings()[1]
        Setting(name='epochs', type='whole number', default='30', sentence='Passes over the training data.')
    """
    return list(describe(RunConfig))


# ---- records -----------------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """The configuration as plain data, for records and checkpoints. Rules become text."""
    if isinstance(value, lr.Rule):
        return repr(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple | list) else value


# What may change between starts of one run: how it is shown, saved and ended, and how ranks communicate.
FREE = frozenset(
    {"name", "evaluate_every", "target", "checkpoint_every", "checkpoint_every_steps", "keep", "log_every", "trace_steps"}
    | {"mllog", "submission", "tensorboard", "wandb", "mlflow", "comm"}
)


def identity(values: dict[str, Any]) -> dict[str, Any]:
    """The part of a plain configuration that decides what is trained. Starts with the same identity are one run.

    The directory of the data does not count.
    """
    kept = {name: value for name, value in values.items() if name not in FREE and (name, value) != ("init", None)}
    data = {name: value for name, value in kept["data"].items() if name not in ("workers", "test", "test_batch")}
    source = data["source"]
    return kept | {"data": data | {"source": source if is_own_source(source) else source.partition(":")[0]}}
