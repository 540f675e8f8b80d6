"""Tracks which parameters are trained, the order of their gradients, and whether the groups still match them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from phalanx.comm.communicator import Communicator
from phalanx.grad.allreduce import AllReduce
from phalanx.grad.layout import Kind, agree_on_groups, kind_of, place_of
from phalanx.grad.reducer import Group
from phalanx.grad.wires import Wire
from phalanx.grad.wires.carrier import Carrier, give, keep


class Trained:
    """The parameters of an optimizer. Frozen ones are not sent and get no gradient. The options are those of the groups."""

    def __init__(
        self, comm: Communicator, sync: AllReduce, *, wire: Wire | None, bucket_bytes: int | None, delayed: bool
    ) -> None:
        self._comm, self._sync = comm, sync
        self._wire, self._bucket_bytes, self._delayed = wire, bucket_bytes, delayed
        self.params: list[torch.nn.Parameter] = []  # frozen ones, too
        self.names: dict[torch.nn.Parameter, str] = {}
        self.now: list[torch.nn.Parameter] = []
        self.agreed = False  # the groups are those of the parameters trained now
        self._kinds: list[tuple[Any, Kind]] = []  # when the groups were agreed on
        self._groups: list[Group] = []  # those that were agreed on last
        self._kept: dict[str, dict[str, torch.Tensor]] = {}  # what a checkpoint has of wires, until there are groups
        self._seen: dict[torch.nn.Parameter, int] = {}  # pieces in which a gradient came, in the order of the first backward

    def set(self, params: Sequence[torch.nn.Parameter], names: Sequence[str]) -> None:
        """Replace the parameters."""
        self.params, self.names = list(params), dict(zip(params, names))
        self.agreed = False
        self._seen = dict.fromkeys(self._seen, 0)

    def are(self, params: Sequence[torch.nn.Parameter]) -> bool:
        """Whether the parameters are `params`, in this order."""
        return _same(self.params, params)

    def look(self) -> list[torch.nn.Parameter]:
        """Update and return the list of parameters that are not frozen."""
        self.now = [p for p in self.params if p.requires_grad]
        return self.now

    def saw(self, p: torch.nn.Parameter) -> None:
        """Note that a gradient came, or a piece of one."""
        if not self.agreed:
            self._seen[p] = self._seen.get(p, 0) + 1

    @property
    def changed(self) -> bool:
        """Whether parameters were added, frozen, or changed in type or layout since the groups were agreed on."""
        now = [p for p in self.params if p.requires_grad]
        if not self.agreed or not _same(self.now, now):
            return True
        # The exact kind is slow to compute, so compare first what is usually equal.
        return any(_looks(p) != looks and kind_of(p) != kind for p, (looks, kind) in zip(now, self._kinds))

    def agree(self) -> list[Group]:
        """Make groups of the parameters trained now. All ranks call it and get the same groups."""
        names = [self.names[p] for p in self.params]
        self._kept = self.kept_by_wires()
        groups = agree_on_groups(
            self.params,
            names,
            self._seen,
            self._comm,
            self._sync,
            wire=self._wire,
            bucket_bytes=self._bucket_bytes,
            delayed=self._delayed,
        )
        self._kinds = [(_looks(p), kind_of(p)) for p in self.now]
        self.agreed, self._groups = True, groups
        give(self._carriers(), self._kept)
        self._kept = {}
        return groups

    # ---- what wires keep between steps -----------------------------------------------------------------------------------------

    def kept_by_wires(self) -> dict[str, dict[str, torch.Tensor]]:
        """What wires keep on this rank, such as error feedback, by parameter name. Nothing may be in flight."""
        return self._kept | keep(self._carriers())

    def give_to_wires(self, kept: dict[str, dict[str, torch.Tensor]]) -> None:
        """Restore what wires keep, now or as soon as there are groups."""
        give(self._carriers(), kept)
        self._kept = {} if self._groups else kept

    def _carriers(self) -> list[tuple[Carrier | None, dict[str, range]]]:
        """The carriers of the groups, each with the places of its parameters in it."""
        return [
            (group.wire, {self.names[p]: place_of(p, group) for p in group.params if p in self.names}) for group in self._groups
        ]


def _looks(p: torch.Tensor) -> Any:
    return p.dtype, p.device, p.shape, p.stride()


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two lists hold the same objects: `==` of tensors means something else."""
    return len(some) == len(others) and all(x is y for x, y in zip(some, others))
