"""Local steps, as values: what `create_multi_node_optimizer(sync=...)` takes to let ranks communicate only once in many steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from phalanx.grad.wires import Int8

if TYPE_CHECKING:
    from phalanx.comm.communicator import Communicator

TRAVELS = 5  # inner steps of `overlap=True` at most: this many cost Streaming DiLoCo next to nothing (arXiv 2501.18512)

Outer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | Mapping[str, Any] | torch.optim.Optimizer


@dataclass(frozen=True, slots=True)
class LocalSGD:
    """Let each rank train alone for some steps, then average parameters, for `create_multi_node_optimizer(sync=...)`.

    Between two averages replicas differ. `opt.average_()` makes them equal. Optimizer state stays with its rank.

    Args:
        every: Steps of each rank between two averages of the same parameter.
        fragments: Cut the parameters into this many parts, which take turns. Each is sent once in `every` steps.
        overlap: Send a part during the next inner steps. A number sets how many. True takes the steps until the next part
            is sent, at most 5. What a rank did meanwhile is kept. False waits in `step`.
        level: `"rank"`, or `"host"`: the ranks of a host average their gradients in every step, as with `AllReduce`. None is
            `"host"` where several hosts hold several ranks.
        start: Average the gradients of all ranks in the first `start` steps, as `AllReduce` does. Local steps come after them.

    Raises:
        ValueError: If an option makes no sense.
        TypeError: If an option has the wrong type.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> opt = phalanx.create_multi_node_optimizer(sgd, comm, sync=phalanx.LocalSGD(every=20))
    """

    every: int
    fragments: int = 1
    overlap: bool | int = False
    level: Literal["rank", "host"] | None = None
    start: int = 0

    def __post_init__(self) -> None:
        _check("LocalSGD", self)

    def as_outer_steps(self) -> DiLoCo:
        """Its average is an outer step with rate 1 and no momentum."""
        return DiLoCo(self.every, {"lr": 1.0}, self.fragments, self.overlap, level=self.level, start=self.start)


@dataclass(frozen=True, slots=True)
class DiLoCo:
    """Let each rank train alone for many steps, then do one outer step, for `create_multi_node_optimizer(sync=...)`.

    The outer optimizer's gradient is the mean, over the ranks, of how far each has come since the last outer step. Between two
    outer steps replicas differ. `opt.average_()` makes them equal. The state of the inner optimizer stays with its rank.

    Args:
        every: Inner steps between two outer steps of the same parameter.
        outer: The outer optimizer, before its parameters exist: a function of a list of parameters, such as
            `functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)`; or the keyword arguments of
            torch.optim.SGD as a dict; or any torch optimizer, whose class and defaults are taken. None is the function above.
        fragments: Cut the parameters into this many parts, which take turns. Each is sent once in `every` inner steps.
        overlap: Send a part during the next inner steps. A number sets how many. True takes the steps until the next part
            is sent, at most 5. What a rank did meanwhile is kept. False waits in `step`.
        wire: Send torch.float16, torch.bfloat16 or `phalanx.Int8(...)` instead of the parameters' own dtype. What Int8 rounds
            away is added to the next pseudo-gradient. Only with partners="all".
        partners: `"all"`, or `"random"`: each outer step is made with one other rank, drawn anew every time (NoLoCo). Ranks then
            have different outer parameters, which are pulled together.
        seed: Seeds the draw of partners. All ranks pass the same.
        level: `"rank"`, or `"host"`: the ranks of a host average their gradients in every step, as with `AllReduce`. None is
            `"host"` where several hosts hold several ranks, unless partners are random.
        start: Average the gradients of all ranks in the first `start` steps, as `AllReduce` does. Local steps come after them.

    Raises:
        ValueError: If an option makes no sense.
        TypeError: If an option has the wrong type.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> adam = torch.optim.AdamW(model.parameters(), lr=0.001)
        >>> sync = phalanx.DiLoCo(every=50, outer={"lr": 0.7, "momentum": 0.9, "nesterov": True}, fragments=2, overlap=True)
        >>> opt = phalanx.create_multi_node_optimizer(adam, comm, sync=sync)
    """

    every: int
    outer: Outer | None = None
    fragments: int = 1
    overlap: bool | int = False
    wire: torch.dtype | Int8 | None = None
    partners: Literal["all", "random"] = "all"
    seed: int = 0
    level: Literal["rank", "host"] | None = None
    start: int = 0

    def __post_init__(self) -> None:
        _check("DiLoCo", self)
        kinds = (Mapping, torch.optim.Optimizer)
        if self.outer is not None and not isinstance(self.outer, kinds) and not callable(self.outer):
            raise TypeError(
                f"DiLoCo(outer={self.outer!r}): a function of parameters such as functools.partial(torch.optim.SGD, lr=0.7), a "
                "dict of arguments of torch.optim.SGD, or a torch optimizer"
            )
        if self.partners not in ("all", "random"):
            raise ValueError(f"DiLoCo(partners={self.partners!r}): one of 'all', 'random'")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise TypeError(f"DiLoCo(seed={self.seed!r}): an int, the same on all ranks")
        if self.partners == "random" and self.level == "host":
            raise ValueError("DiLoCo(partners='random', level='host'): partners are ranks; use level='rank', or partners='all'")

    @property
    def travels(self) -> int:
        """The number of inner steps that a part is in flight."""
        if self.overlap is True:
            return max(1, min(TRAVELS, self.every // self.fragments))
        return int(self.overlap)

    def due(self, step: int) -> list[int]:
        """The parts that leave after inner step number `step`, counted from 1: spread evenly over `every` steps."""
        return [part for part in range(self.fragments) if (step - (part + 1) * self.every // self.fragments) % self.every == 0]

    def build(self, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The outer optimizer of these parameters."""
        if self.outer is None:  # Douillard et al., arXiv 2311.08105
            return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)
        if isinstance(self.outer, Mapping):
            return torch.optim.SGD(params, **self.outer)
        if isinstance(self.outer, torch.optim.Optimizer):
            return _like(self.outer, params)
        made = self.outer(params)
        if not isinstance(made, torch.optim.Optimizer):
            raise TypeError(f"DiLoCo(outer=...) made a {type(made).__name__}, not a torch.optim.Optimizer")
        return made


def _like(model: torch.optim.Optimizer, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer of the same class with the same settings."""
    names = inspect.signature(type(model)).parameters
    return type(model)(params, **{name: value for name, value in model.defaults.items() if name in names})


def _check(name: str, sync: LocalSGD | DiLoCo) -> None:
    for option, least in (("every", 1), ("fragments", 1), ("start", 0)):
        value = getattr(sync, option)
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name}({option}={value!r}): a whole number")
        if value < least:
            raise ValueError(f"{name}({option}={value}): at least {least}")
    if sync.fragments > sync.every:
        raise ValueError(f"{name}(every={sync.every}, fragments={sync.fragments}): at most one part leaves in a step")
    if not isinstance(sync.overlap, int) or not 0 <= sync.overlap <= sync.every:
        raise ValueError(f"{name}(overlap={sync.overlap!r}): True, False, or inner steps, at most every={sync.every}")
    if sync.level not in ("rank", "host", None):
        raise ValueError(f"{name}(level={sync.level!r}): one of 'rank', 'host', None")


def level_of(comm: Communicator, plan: DiLoCo) -> str:
    """Whose steps are local: a rank's, or those of a host whose ranks act as one."""
    if plan.partners == "random" or comm.elastic:  # an elastic communicator cannot be split
        return "rank"
    return plan.level or ("host" if comm.size > comm.inter_size > 1 else "rank")
