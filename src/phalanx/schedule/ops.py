"""A collective algorithm as a value: `Schedule` = steps in sequence, each a set of `Move`, `Collective` and `Scale`.

Every rank holds one buffer, cut into `chunks` equal parts; a *slot* is one chunk of one rank. Steps happen one after the
other. The ops of one step happen together and read the state before the step. Two ops that write one slot in one step are an
error unless both add, and a rank is in at most one `Collective` per step.

Two levels of op, because two kinds of engine exist: NCCL wants `Collective` (one library call by one group), gloo and shared
memory want `Move` (one message). `lower` turns the first into the second, and `verify` proves either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

Kind = Literal["all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast"]
Goal = Literal["sum", "mean", "mixing", "copy"]


class ScheduleError(ValueError):
    """A schedule that does not do what it claims; the message carries the facts."""


@dataclass(frozen=True, slots=True)
class Move:
    """Rank `src` sends `chunks` to `dst`, which overwrites its own or, with `reduce`, adds."""

    src: int
    dst: int
    chunks: range
    reduce: bool = False


@dataclass(frozen=True, slots=True)
class Collective:
    """One library call by the ranks of `group` on `chunks`.

    `reduce_scatter` and `all_gather` cut `chunks` into len(group) equal parts, part i being that of group[i]. `reduce` and
    `broadcast` have their root at group[0]. What a call leaves behind where it promises nothing (the other parts after a
    reduce_scatter, the non-roots after a reduce) is junk: libraries differ, so a schedule may not read it.
    """

    kind: Kind
    group: tuple[int, ...]
    chunks: range


@dataclass(frozen=True, slots=True)
class Scale:
    """Every rank of `ranks` multiplies `chunks` of its own buffer by `factor`."""

    ranks: range
    chunks: range
    factor: Fraction


Op = Move | Collective | Scale


@dataclass(frozen=True, slots=True)
class Step:
    """Ops that happen together; `label` says what the step is for, in a few words, for people."""

    ops: tuple[Op, ...]
    label: str = ""


@dataclass(frozen=True, slots=True)
class Schedule:
    """An algorithm for `world` ranks on buffers of `chunks` chunks, and its claim `goal`.

    The goals, as the weight with which origin j ends in every slot of rank i: `sum`: 1. `mean`: 1/world. `mixing`: any
    doubly stochastic matrix (a gossip round). `copy`: 1 for rank `root`, 0 for the others (a broadcast).
    """

    name: str
    world: int
    chunks: int
    steps: tuple[Step, ...]
    goal: Goal = "sum"
    root: int = 0

    def ops(self) -> Iterator[Op]:
        """Every op, in step order."""
        for step in self.steps:
            yield from step.ops

    @property
    def lowered(self) -> bool:
        """Whether only `Move` and `Scale` are left."""
        return not any(isinstance(op, Collective) for op in self.ops())
