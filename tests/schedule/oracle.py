"""A stupid interpreter of schedules: every slot a number, every step a copy of the world. Shares no code with the checker."""

import random
from collections.abc import Sequence
from itertools import count
from typing import Any

from phalanx.schedule import Collective, Move, Schedule, Step


def run(s: Schedule, inputs: Sequence[Sequence[Any]], junk: random.Random | None = None) -> list[list[Any]]:
    """What inputs[rank][chunk] becomes; what a collective leaves undefined becomes a number without meaning."""
    junk = junk or random.Random(99)
    state = [list(row) for row in inputs]
    for step in s.steps:
        before = [list(row) for row in state]
        for op in step.ops:
            if isinstance(op, Move):
                for c in [c for run in op.runs for c in run]:
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


def paper_swing(n: int, *, together: bool) -> Schedule:
    """Swing as in the paper, for a power of two: block r belongs to rank r, so messages are scattered over the buffer.

    With `together` each is one Move, and without it every run of chunks is a Move of its own.
    """
    rounds = n.bit_length() - 1
    partner = [[(r + (1 - (-2) ** (s + 1)) // 3 * (1 if r % 2 == 0 else -1)) % n for r in range(n)] for s in range(rounds)]
    blocks = [{r} for r in range(n)]  # that rank r answers for, from the last step backwards
    halving, doubling = [], []
    for s in reversed(range(rounds)):
        runs = [tuple(joined_runs(part)) for part in blocks]
        give = [(r, q, runs[q], True) for r, q in enumerate(partner[s])]
        back = [(r, q, runs[r], False) for r, q in enumerate(partner[s])]
        for steps, messages in ((halving, give), (doubling, back)):
            if together:
                steps.append(Step(tuple(Move(*message) for message in messages)))
            else:
                steps.append(Step(tuple(Move(src, dst, run, add) for src, dst, part, add in messages for run in part)))
        blocks = [part | blocks[partner[s][r]] for r, part in enumerate(blocks)]
    return Schedule(f"swing of the paper ({n})", n, n, tuple(halving[::-1] + doubling))


def joined_runs(numbers: set[int]) -> list[range]:
    starts = [i for i in sorted(numbers) if i - 1 not in numbers]
    return [range(i, next(j for j in count(i) if j not in numbers)) for i in starts]
