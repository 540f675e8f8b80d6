"""A stupid interpreter of schedules: every slot a number, every step a copy of the world. Shares no code with the checker."""

import random
from collections.abc import Sequence
from typing import Any

from phalanx.schedule import Collective, Move, Schedule


def run(s: Schedule, inputs: Sequence[Sequence[Any]], junk: random.Random | None = None) -> list[list[Any]]:
    """What inputs[rank][chunk] becomes; what a collective leaves undefined becomes a number without meaning."""
    junk = junk or random.Random(99)
    state = [list(row) for row in inputs]
    for step in s.steps:
        before = [list(row) for row in state]
        for op in step.ops:
            if isinstance(op, Move):
                for c in op.chunks:
                    came = before[op.src][c] * op.factor if op.factor != 1 else before[op.src][c]
                    state[op.dst][c] = state[op.dst][c] + came if op.reduce else came
            elif isinstance(op, Collective):
                for i, c in enumerate(op.chunks):
                    owner = op.group[i * len(op.group) // len(op.chunks)]
                    total = sum(before[rank][c] for rank in op.group)
                    for rank in op.group:
                        if op.kind == "all_reduce" or (op.kind == "reduce_scatter" and rank == owner):
                            state[rank][c] = total
                        elif op.kind == "reduce" and rank == op.group[0]:
                            state[rank][c] = total
                        elif op.kind == "all_gather":
                            state[rank][c] = before[owner][c]
                        elif op.kind == "broadcast":
                            state[rank][c] = before[op.group[0]][c]
                        else:
                            state[rank][c] = junk.getrandbits(70)
            else:
                for rank in op.ranks:
                    for c in op.chunks:
                        state[rank][c] = before[rank][c] * op.factor
    return state


def integers(s: Schedule, seed: int = 1) -> list[list[int]]:
    """A large random number for every slot, all different."""
    rng = random.Random(seed)
    return [[rng.getrandbits(64) for _ in range(s.chunks)] for _ in range(s.world)]


def sums_everything(s: Schedule) -> bool:
    """Whether every slot ends as the sum of its chunk over the ranks."""
    inputs = integers(s)
    wanted = [sum(column) for column in zip(*inputs, strict=True)]
    return all(row == wanted for row in run(s, inputs))


def copies_root(s: Schedule) -> bool:
    """Whether every rank ends with the buffer of the root."""
    inputs = integers(s)
    return all(row == inputs[s.root] for row in run(s, inputs))
