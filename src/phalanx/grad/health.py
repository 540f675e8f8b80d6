"""Finds training errors that raise no exception: replicas that drift apart, NaN from one rank, the same data on every rank.

All checks are cheap enough to be on by default. Replicas are compared every `AllReduce.check_every` steps (drift.py). Only a few
elements are checked for NaN, because a loss that is NaN makes all of them NaN.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence

import torch

from phalanx.comm.communicator import Communicator
from phalanx.comm.verdict import name_ranks
from phalanx.grad.allreduce import AllReduce
from phalanx.grad.drift import Drift, OptimizerState, bit_sums, contents
from phalanx.grad.finite import Finite
from phalanx.grad.replicas import some
from phalanx.grad.wires import Wire

log = logging.getLogger("phalanx")


class Health:
    """Runs the checks of the ranks of `comm`, and warns once of each problem. All ranks call it the same way."""

    def __init__(self, comm: Communicator, sync: AllReduce) -> None:
        self._comm, self._every = comm, sync.check_every
        self._warned: set[str] = set()
        self.drift = Drift(comm, heals=sync.on_difference == "heal")

    @property
    def warned(self) -> list[str]:
        """The warnings and checks that were already made. They are the same on all ranks of an elastic job."""
        return sorted(self._warned)

    @warned.setter
    def warned(self, what: Sequence[str]) -> None:
        self._warned = set(what)

    def _first(self, what: str) -> bool:
        """Whether this is the first time, for a warning or a check."""
        first = what not in self._warned
        self._warned.add(what)
        return first

    def check_drift(self, names: Mapping[torch.nn.Parameter, str], state: OptimizerState, step: int) -> None:
        """Compare the replicas in every `check_every`-th step (drift.py)."""
        if self._every and self._comm.size > 1 and step and step % self._every == 0:
            self.drift.check(contents(names, state), step)

    def warn_of_nan(self, finite: Finite, step: int) -> None:
        """Name, on all ranks, the first rank whose gradients are not finite. The others only got what it sent."""
        if not self._first("nan"):
            return
        every = self._comm.allgather_obj(finite.ago())
        longest = max((ago for ago in every if ago is not None), default=None)
        if longest is not None:
            who = [rank for rank, ago in enumerate(every) if ago == longest]
            when = f"step {step}" if longest == 0 else f"before step {step}"  # on a GPU this becomes known later
            warnings.warn(
                f"{when}: the gradients of {name_ranks(who)} are not finite, so neither is the mean on any rank. Look at "
                "the loss and the data of that rank. You get this warning once",
                stacklevel=3,
            )

    def warn_of_equal_gradients(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Warn, on rank 0, if all ranks have the same first gradients, because then they read the same samples."""
        if self._comm.size == 1 or not self._first("equal"):
            return
        gradients = [p.grad.detach() for p in params if p.grad is not None and p.grad.layout is torch.strided]
        every = self._comm.allgather_obj(int(bit_sums(gradients).sum()))
        if self._comm.rank == 0 and len(set(every)) == 1 and any(bool(g.any()) for g in gradients):
            log.warning(
                "phalanx: all %d ranks have the same first gradients: do they read the same data? Give each rank its share with "
                "phalanx.scatter_dataset(dataset, comm), or with torch's DistributedSampler",
                self._comm.size,
            )

    def warn_of_unused(self, names: Mapping[torch.nn.Parameter, str]) -> None:
        """Warn of trained parameters without a gradient."""
        unused = [name for p, name in names.items() if p.requires_grad and p.grad is None]
        if unused and self._first("unused"):
            warnings.warn(
                f"rank {self._comm.rank}: no gradient for {len(unused)} parameter(s), {some(unused)}; "
                "they count as zeros in the mean. This is the only warning",
                stacklevel=7,
            )

    def warn_of_overflow(self, names: Mapping[torch.nn.Parameter, str], over: set[int], wire: Wire | None) -> None:
        """Warn of means that are not finite after a compressing wire, for the parameters with these ids."""
        if wire is None or not over or not self._first("overflow"):
            return
        gone = {name: p for p, name in names.items() if id(p) in over}
        # on a GPU this becomes known only when the gradients belong to a later step
        bad = [name for name, p in gone.items() if not (p.grad is None or bool(torch.isfinite(p.grad).all()))] or list(gone)
        why = "some rank's gradient was not, and what is sent with it becomes NaN. Look at the loss, or use a GradScaler"
        if isinstance(wire, torch.dtype):
            why = (
                f"sent as {wire} it exceeded {torch.finfo(wire).max:g}, or it was not finite before. "
                "Use wire=torch.bfloat16, or a GradScaler"
            )
        warnings.warn(f"the mean gradient of {some(bad)} is not finite: {why}. This is the only warning", stacklevel=7)
