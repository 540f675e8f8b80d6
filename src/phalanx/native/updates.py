"""Optimizer steps in the native core: tables with one row per tensor, and the functions that apply them.

A row is a named tuple of numbers. Its fields match those of the extension, in the same order; importing this module fails if the
extension was built from other sources.

`update_sgd` and `update_adam` are fused: they sum the gradients of all ranks of the host and update one copy of the parameters
that all ranks share. `lars_step` updates tensors of this process only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from phalanx.native import core
from phalanx.native.team import HostTeam


class SgdRow(NamedTuple):
    """How torch.optim.SGD (dampening 0) or phalanx.Lars updates `count` elements from `offset` of the flat buffers.

    If `adapted`, the step is multiplied by LARS's trust ratio. `lr_in_momentum` puts the rate inside the velocity.
    """

    offset: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    lr_in_momentum: bool = False
    adapted: bool = False
    trust: float = 0.0
    eps: float = 0.0

    @property
    def squares(self) -> int:
        """How many float64 values a fused update keeps for this tensor if it is adapted."""
        return core._native.SQUARES * -(-self.count // core._native.CHUNK)


class AdamRow(NamedTuple):
    """How torch.optim.Adam, or AdamW if `decoupled`, updates a tensor in its `step`-th step."""

    offset: int
    count: int  # type: ignore[assignment]
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    step: int


if not core.UNAVAILABLE and (SgdRow._fields, AdamRow._fields) != (core._native.SGD_ROW, core._native.ADAM_ROW):
    raise ImportError("phalanx._native was built from other sources: install phalanx again")


def table_of(rows: Sequence[SgdRow] | Sequence[AdamRow]) -> torch.Tensor:
    """The rows as the matrix that the core reads. You may change entries between updates; lr is column 2."""
    return torch.tensor([tuple(row) for row in rows], dtype=torch.float64)


def update_sgd(
    team: HostTeam,
    gradients: torch.Tensor,
    parameters: torch.Tensor,
    velocities: torch.Tensor,
    table: torch.Tensor,
    *,
    scale: float,
    squares: torch.Tensor | None = None,
    carry: bool = False,
) -> None:
    """Update the parameters of the whole host by SGD or LARS with `scale` times the sum of all ranks' gradients.

    All buffers are flat float32 of one layout: `gradients` from `team.allocate`, the others from `team.allocate_one_for_all`.
    `table` has SgdRows, the same on all ranks. The gradients are only read. If a tensor is adapted, `squares` (float64, shared)
    holds the norms; with `carry`, the norms of the parameters are those that the last update left there. If you wrote to the
    parameters in between, the update notices and corrects the step. When it returns, all ranks see the new parameters.
    """
    _check_table(table, SgdRow)
    _check_flat(table, gradients, parameters, velocities)
    native, adapted = core._native, table[:, SgdRow._fields.index("adapted")]
    needed = native.SQUARES * int(((table[:, 1] + native.CHUNK - 1) // native.CHUNK).sum()) if bool(adapted.any()) else 0
    room = 0 if squares is None else squares.numel()
    if room < needed or (squares is not None and not (squares.dtype is torch.float64 and squares.is_contiguous())):
        raise ValueError(f"these rules want {needed} contiguous float64 for squares, got {room}")
    g, w, v, rows = (each.data_ptr() for each in (gradients, parameters, velocities, table))
    kept = 0 if squares is None else squares.data_ptr()
    team.call(f"update({len(table)} tensors)", lambda it: it.update(g, w, v, kept, int(carry), rows, len(table), scale))


def update_adam(
    team: HostTeam,
    gradients: torch.Tensor,
    parameters: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    table: torch.Tensor,
    *,
    scale: float,
) -> None:
    """Like `update_sgd`, by Adam or AdamW. `first` and `second` are moments from `team.allocate_one_for_all`."""
    _check_table(table, AdamRow)
    _check_flat(table, gradients, parameters, first, second)
    g, w, m, v, rows = (each.data_ptr() for each in (gradients, parameters, first, second, table))
    team.call(f"update({len(table)} tensors)", lambda it: it.update_adam(g, w, m, v, rows, len(table), scale))


def lars_step(tensors: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], rows: Sequence[SgdRow]) -> None:
    """Update tensors of this process, given as (parameter, velocity, gradient): dense float32 on the CPU, of one layout.

    They may lie anywhere: the offset and count of a row are ignored.
    """
    table = table_of(rows)
    table[:, 1] = torch.tensor([w.numel() for w, _, _ in tensors])
    where = torch.tensor([[x.data_ptr() for x in each] for each in tensors], dtype=torch.int64)
    core._native.lars_step(where.data_ptr(), table.data_ptr(), len(tensors))


def _check_table(table: torch.Tensor, row: type[SgdRow] | type[AdamRow]) -> None:
    if not (table.dtype is torch.float64 and table.is_contiguous() and table.dim() == 2 and table.shape[1] == len(row._fields)):
        raise ValueError(f"the table is what table_of() makes of {row.__name__}s, got {table.dtype} {tuple(table.shape)}")


def _check_flat(table: torch.Tensor, *buffers: torch.Tensor) -> None:
    end = int((table[:, 0] + table[:, 1]).max()) if len(table) else 0
    for x in buffers:
        if x.dtype is not torch.float32 or not x.is_contiguous() or x.numel() < end:
            raise ValueError(f"a fused update wants contiguous float32 of at least {end} elements, got {x.dtype}[{x.numel()}]")
