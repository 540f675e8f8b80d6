"""Process groups of a simulated job: who belongs to which, and in which order everybody made them."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from tests.simulated_cuda import nccl
from tests.simulated_cuda.nccl import CollectiveMismatchError
from tests.simulated_cuda.order import show, stack
from tests.simulated_cuda.simulation import process, simulation
from tests.simulated_cuda.store import Store


class Group:
    """A process group, shared by all its members."""

    def __init__(self, name: str, ranks: Sequence[int]) -> None:
        self.name, self.ranks = name, tuple(ranks)
        self.meetings: dict[tuple[str, int], Any] = {}  # by engine and number
        self.counts: dict[tuple[str, int], int] = {}  # operations so far, by engine and rank
        self.devices: dict[int, tuple[int, int]] = {}  # of NCCL: host and index, by rank
        self.pairs: dict[Any, Any] = {}

    def __repr__(self) -> str:
        return f"group {self.name} of ranks {list(self.ranks)}"

    def number(self, engine: str, rank: int) -> int:
        """Of the calling rank's next operation."""
        self.counts[engine, rank] = number = self.counts.get((engine, rank), 0) + 1
        return number

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.ranks.index(process().rank)

    def abort(self) -> None:
        nccl.abort(process(), self)

    def _get_backend(self, device: torch.device) -> Any:
        """The engine of this group, as far as the product calls it."""
        nothing = lambda: None  # noqa: E731
        return types.SimpleNamespace(abort=self.abort, _group_start=nothing, _group_end=nothing)


class World:
    """What the ranks of one job share."""

    def __init__(self, size: int) -> None:
        self.size, self.store = size, Store()
        self.everyone = Group("world", range(size))
        self.made: list[Group] = []  # by new_group, in order
        self.calls: dict[int, list[str]] = {rank: [] for rank in range(size)}  # what each rank called, in order


def world() -> World:
    found: World | None = process().own.get("world")
    if found is None:
        raise ValueError("Default process group has not been initialized, please make sure to call init_process_group.")
    return found


def log(text: str) -> None:
    world().calls[process().rank].append(text)


def group_of(group: Any) -> Group:
    return world().everyone if group is None else group


def init_process_group(backend: Any = None, *, store: Any = None, rank: int = -1, world_size: int = -1, **options: Any) -> None:
    """The ranks of the running job share a world."""
    own = process()
    if "world" in own.own:
        raise ValueError("trying to initialize the default process group twice!")
    own.own["world"] = simulation().own.setdefault("world", World(world_size))


def destroy_process_group(group: Any = None) -> None:
    if group is None or group is process().own.get("world").everyone:
        process().own.pop("world", None)


def new_group(ranks: Sequence[int] | None = None, *args: Any, backend: Any = None, **options: Any) -> Any:
    """All ranks call it, in one order."""
    shared, own = world(), process()
    members = tuple(range(shared.size) if ranks is None else ranks)
    if options.get("sort_ranks", True):
        members = tuple(sorted(members))
    number = shared.everyone.number("new_group", own.rank)
    if number > len(shared.made):
        shared.made.append(Group(f"{number}", members))
    made = shared.made[number - 1]
    log(f"new_group {list(members)}" + (f" {backend}" if backend else ""))
    if made.ranks != members:
        passed = f"rank {own.rank} passes {list(members)}, another rank {list(made.ranks)}"
        error = CollectiveMismatchError(f"new_group number {number}: {passed}\n{show(stack(2))}")
        simulation().complain(error)
        raise error
    return made if own.rank in members else dist.GroupMember.NON_GROUP_MEMBER
