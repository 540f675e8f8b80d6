"""What a run is, as a value: a recipe is a Python file with one `config = RunConfig(...)`.

Every part is a frozen dataclass beside what it configures. `override` changes values by their paths, as `--set model.depth=32`
does: typed, and with an error that lists what exists.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from phalanx.data import BatchPlan, Stage
from phalanx.optim import lr
from phalanx.train.course import Course
from phalanx.train.model import ModelConfig
from phalanx.train.samples import DataConfig
from phalanx.train.update import CommConfig, OptimizerConfig, RateConfig


class ConfigError(ValueError):
    """A configuration that makes no sense; the message says what would."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A training run. `stages` replace `batch` and must have `epochs` together, where the batch changes during the run."""

    name: str
    epochs: int = 30
    batch: int = 120  # samples per update, over all ranks
    stages: tuple[Stage, ...] = ()
    micro_batch: int | None = None  # the most samples of one backward pass on one rank; None: no accumulation
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    rate: RateConfig = field(default_factory=RateConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    label_smoothing: float = 0.0
    seed: int = 0
    evaluate_every: int = 1  # epochs
    target: float | None = None  # top-1 accuracy, from 0 to 1, at which the run ends early
    checkpoint_every: int = 1  # epochs
    checkpoint_every_steps: int | None = None  # amid an epoch, too; for epochs that are too long to lose
    keep: int = 3  # checkpoints
    log_every: int = 10  # steps
    trace_steps: int = 3  # of the second epoch, drawn in the report
    mllog: bool = False  # lines of MLPerf's log on standard output
    tensorboard: bool = False

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "evaluate_every", "checkpoint_every", "keep", "log_every"):
            _at_least(1, name, getattr(self, name))
        for name in ("micro_batch", "checkpoint_every_steps"):
            if getattr(self, name) is not None:
                _at_least(1, name, getattr(self, name))
        _at_least(0, "trace_steps", self.trace_steps)
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed={self.seed}: from 0 to 2**32 - 1")
        if self.target is not None and not 0 < self.target <= 1:
            raise ConfigError(f"target={self.target}: an accuracy, more than 0 and at most 1")
        if not 0 <= self.label_smoothing < 1:
            raise ConfigError(f"label_smoothing={self.label_smoothing}: from 0 to less than 1")
        if self.stages and sum(stage.epochs for stage in self.stages) != self.epochs:
            total = sum(stage.epochs for stage in self.stages)
            raise ConfigError(f"the stages have {total} epochs, but epochs={self.epochs}: make them equal")
        if self.comm.double_buffering and self.model.precision == "float16":
            raise ConfigError(
                "comm.double_buffering applies gradients of the step before, model.precision=float16 scales them by the scale of "
                "now: use model.precision=bfloat16"
            )
        if self.comm.fused and self.data.on_bad == "skip":
            raise ConfigError("comm.fused=True wants equally many samples on all ranks, data.on_bad=skip may leave some out")
        if self.comm.fused and self.data.last == "keep":
            raise ConfigError("comm.fused=True wants equally many samples on all ranks, data.last=keep may not have them")
        if self.model.batchnorm.statistics == "shared" and self.uneven:
            raise ConfigError(
                "model.batchnorm.statistics=shared wants samples on all ranks in every step: "
                "data.on_bad=error, and data.last=drop or pad"
            )

    @property
    def plan(self) -> BatchPlan:
        return BatchPlan(self.stages or (Stage(self.epochs, self.batch),))

    @property
    def course(self) -> Course:
        """Rate, momentum and batch of every step; ValueError where they contradict each other."""
        return Course(self.plan, self.rate, self.optimizer)

    @property
    def uneven(self) -> bool:
        """Whether ranks may have different numbers of samples in a step."""
        return self.data.on_bad == "skip" or self.data.last == "keep"


def _at_least(least: int, name: str, value: int) -> None:
    if not isinstance(value, int):
        raise ConfigError(f"{name}={value!r}: a whole number")
    if value < least:
        raise ConfigError(f"{name}={value}: at least {least}")


# ---- paths -------------------------------------------------------------------------------------------------------------------


def paths(config: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that can be set, with its path: `optimizer.momentum`, `stages.0.batch`."""
    parts = _parts(config)
    if parts is None:
        yield before, config
        return
    for name, value in parts.items():
        yield from paths(value, f"{before}.{name}" if before else name)


def override(config: RunConfig, settings: Mapping[str, str]) -> RunConfig:
    """A copy of `config` with the values at some paths read from texts; ConfigError where there is none, or of another type.

    All of them at once: a network and its depth make sense together, and may not one after the other.
    """
    known = [path for path, _ in paths(config)]
    for path in settings:
        if path not in known and path != "stages":  # as a whole as well as in parts
            raise ConfigError(_no_such(path, known))
    changed: RunConfig = _override(config, "", settings)
    return changed


def _override(value: Any, at: str, settings: Mapping[str, str]) -> Any:
    """`value`, which has parts and is found at path `at`, with the settings below it."""
    news: dict[str, Any] = {}
    for name, part in (_parts(value) or {}).items():
        path = f"{at}.{name}" if at else name
        below = {other: text for other, text in settings.items() if other.startswith(f"{path}.")}
        if path in settings:
            news[name] = parse(settings[path], _type_of(value, name), path)
        elif below:
            news[name] = _override(part, path, below)
    try:
        if isinstance(value, tuple):
            return tuple(news.get(str(i), item) for i, item in enumerate(value))
        return dataclasses.replace(value, **news)
    except (ValueError, TypeError) as error:
        given = " ".join(f"{path}={_shown(text)}" for path, text in settings.items())
        raise ConfigError(f"{given}: {str(error)[:1000]}") from None


def _shown(text: str) -> str:
    """What was given, as far as a message has room for it."""
    return text if len(text) <= 100 else f"{text[:100]}..."


def _no_such(path: str, known: list[str]) -> str:
    path = _shown(path)
    close = difflib.get_close_matches(path, known, n=1)
    inside = [other for other in known if other.startswith(f"{path}.")]
    if inside:
        return f"{path} has settings of its own: {', '.join(inside)}"
    return f"{path}: there is no such setting{f' ({close[0]}?)' if close else ''}; there are {', '.join(known)}"


def _parts(value: Any) -> dict[str, Any] | None:
    """The named parts of a value that has settings inside; None for a value that is set as a whole."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type | lr.Rule):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
        return {str(i): item for i, item in enumerate(value)}
    return None


def _type_of(owner: Any, name: str) -> Any:
    return typing.get_type_hints(type(owner))[name]


LARGEST = 1 << 53  # of a whole number: what JSON and floats have exactly


def parse(text: str, kind: Any, path: str) -> Any:
    """`text` as a value of the annotated type `kind`."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if type(None) in inner and text.lower() in ("none", ""):
            return None
        (one,) = (k for k in inner if k is not type(None))  # settings are of one type, or None
        return parse(text, one, path)
    if origin is Literal:
        if text in inner:
            return text
        raise ConfigError(f"{path}={_shown(text)}: one of {', '.join(map(str, inner))}")
    if origin is tuple:
        items = [item for item in text.strip("()[] ").split(",") if item.strip()]
        fixed = inner if inner[-1] is not Ellipsis else inner[:1] * len(items)
        if len(items) != len(fixed):
            raise ConfigError(f"{path}={_shown(text)}: {len(fixed)} values, separated by commas")
        return tuple(parse(item.strip(), one, path) for item, one in zip(items, fixed))
    if kind is bool:
        if text.lower() in ("true", "1", "yes", "on", "false", "0", "no", "off"):
            return text.lower() in ("true", "1", "yes", "on")
        raise ConfigError(f"{path}={_shown(text)}: true or false")
    if kind in (int, float):
        try:
            number = kind(text.replace("_", ""))
        except ValueError:
            raise ConfigError(f"{path}={_shown(text)}: {'a whole number' if kind is int else 'a number'}") from None
        if kind is int and abs(number) > LARGEST:
            raise ConfigError(f"{path}={_shown(text)}: a whole number of at most {LARGEST:,}")
        if not math.isfinite(number):
            raise ConfigError(f"{path}={_shown(text)}: a finite number")
        return number
    if kind is str:
        return text
    if kind is Stage:
        return _stage(text, path)
    raise ConfigError(f"{path}: a {getattr(kind, '__name__', kind)} is written in a recipe, not on the command line")


def _stage(text: str, path: str) -> Stage:
    """`30x32768` or, with micro-steps, `30x32768x4`."""
    try:
        return Stage(*(int(number.replace("_", "")) for number in text.split("x")))
    except (ValueError, TypeError):
        form = "EPOCHSxBATCH or EPOCHSxBATCHxMICRO_STEPS, such as 30x32768,60x65536"
        raise ConfigError(f"{path}={_shown(text)}: stages are written {form}") from None


# ---- records -----------------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """The configuration as plain data, for records and checkpoints; rules by their text."""
    if isinstance(value, lr.Rule):
        return repr(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return [plain(item) for item in value] if isinstance(value, tuple | list) else value


# What may change between two starts of one run: how it is shown, saved and ended, and how ranks communicate.
FREE = frozenset(
    {"name", "evaluate_every", "target", "checkpoint_every", "checkpoint_every_steps", "keep", "log_every", "trace_steps"}
    | {"mllog", "tensorboard", "comm"}
)


def identity(values: dict[str, Any]) -> dict[str, Any]:
    """What is trained, of a configuration as plain data: two starts with the same are starts of one run.

    Their data may lie in different directories.
    """
    kept = {name: value for name, value in values.items() if name not in FREE}
    data = {name: value for name, value in kept["data"].items() if name not in ("workers", "test", "test_batch")}
    return kept | {"data": data | {"source": data["source"].partition(":")[0]}}
