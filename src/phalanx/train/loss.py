"""The task of a run, with your own loss if you set one: `loss=my_package.losses:focal`, arguments in `loss.args`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from phalanx.train.argument_text import check_arguments
from phalanx.train.import_path import as_given, blamed_on, check_arguments_of, check_import_path, find, find_callable
from phalanx.train.setting_text import ConfigError
from phalanx.train.settings import setting
from phalanx.train.task import Task, Totals
from phalanx.train.tasks import TASKS, of_all_heads


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Your own loss instead of the task's."""

    HEAD: ClassVar[str] = "name"

    name: str | None = setting(
        None,
        "Import path of your own loss: a function of outputs and labels that returns their mean loss, or a class that "
        "makes one from its arguments. None for the task's.",
    )
    args: dict[str, Any] = setting({}, "Argument NAME of your own loss.")

    def __post_init__(self) -> None:
        check_arguments(self.args, "args")
        if self.name is not None:
            check_import_path(self.name, "none")
        elif self.args:
            raise ValueError(f"args ({', '.join(self.args)}) are for your own loss: set loss as well")

    def build(self, device: torch.device | None = None) -> Callable[[Any, Any], Tensor] | None:
        """Build the loss, with its tensors on a device. None for the task's."""
        if self.name is None:
            return None
        found = find_callable(self.name, "loss")
        if not isinstance(found, type):
            check_arguments_of(found, self.args, self.name, "loss", given=2)
            return partial(found, **as_given(found, self.args)) if self.args else found
        check_arguments_of(found, self.args, self.name, "loss")
        with blamed_on(f"loss={self.name}"):
            made = found(**as_given(found, self.args))
        if not callable(made):
            raise ConfigError(f"loss={self.name} makes a {type(made).__name__}, which cannot be called with outputs and labels")
        if isinstance(made, nn.Module) and any(True for _ in made.parameters()):
            raise ConfigError(f"loss={self.name} has parameters, which nothing would train: make them part of the network")
        own: Callable[[Any, Any], Tensor] = made.to(device) if isinstance(made, nn.Module) and device is not None else made
        return own


def find_task(name: str, loss: LossConfig, smoothing: float, device: torch.device | None = None) -> Task:
    """Find the task by name or import path, with the user's loss if there is one."""
    own = loss.build(device)
    if name in TASKS:
        task = TASKS[name](smoothing)
        return task if own is None else with_loss(task, own)
    found = find(name, "task")
    if not isinstance(found, Task) and callable(found):
        with blamed_on(f"task={name}"):
            found = found()
    if not isinstance(found, Task):
        raise ConfigError(f"task={name} is a {type(found).__name__}, not a phalanx.train.task.Task")
    return found if own is None else with_loss(found, own)


def with_loss(task: Task, own: Callable[[Any, Any], Tensor]) -> Task:
    """Replace the loss of `task`, also in evaluations. Perplexity is dropped, because it needs the task's own loss."""

    def measure(outputs: Any, y: Any) -> Totals:
        return {**task.measure(outputs, y), "loss": (whole(outputs, y) * len(y), len(y))}

    whole = of_all_heads(own) if task.name == "classification" else own
    kept = tuple(metric for metric in task.metrics if not metric.of_loss)
    return dataclasses.replace(
        task, loss=whole, measure=measure, metrics=kept, derive=dict if kept != task.metrics else task.derive, check=None
    )
