"""Double buffering in an elastic job: the exchange of a step is committed in the next step, or done again there.

    step t         gradients t are sent, and a copy of them stays        the means of step t - 1 are applied
    step t + 1     the means of step t arrive: all ranks commit them, or all survivors send their copies again

If a rank dies or joins between the two, the world in which the gradients are in flight ends. Then all ranks send the copies again
in the new world. A rank that has joined meanwhile sends zeros, which do not count.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.grad.allreduce import AllReduce
from phalanx.grad.averager import Averager
from phalanx.grad.elastic import ElasticAverager
from phalanx.grad.following import Following
from phalanx.grad.reducer import GroupReducer
from phalanx.grad.unfinished import Unfinished
from phalanx.grad.wires import Wire


@dataclass(slots=True)
class InFlight:
    """Gradients that were sent in the world `epoch` of these `members`: `copies` of this rank's own, and how they counted."""

    label: str
    epoch: int
    members: tuple[int, ...]
    copies: dict[torch.nn.Parameter, torch.Tensor]
    mine: float
    by_samples: bool
    usual: float | None  # the sum of weights before it


class DelayedElasticAverager(ElasticAverager):
    """As ElasticAverager, with double buffering."""

    _reducer_kind = GroupReducer
    _delays = True

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        following: Following,
        sync: AllReduce,
        *,
        wire: Wire | None,
        bucket_bytes: int | None,
    ) -> None:
        super().__init__(params, names, following, sync, wire=wire, bucket_bytes=bucket_bytes)
        self._in_flight: InFlight | None = None
        self._warned: list[str] = []  # the warnings before the round that may be repeated
        self.unfinished = Landed(self)
        self.comm.on_landing(self.land)

    def _after(self, p: torch.nn.Parameter) -> None:
        Averager._after(self, p)  # nothing is sent in backward, so nothing is kept

    def _make_means(self, *, at_step: bool) -> None:
        begun = time.perf_counter()
        self.land()
        self._warned = self._health.warned
        if self._learned_in != self.comm.membership.epoch or self._trained.changed:
            self.comm.round(self._learn_now)
        self._health.warn_of_unused(self._trained.names)
        self._slow.exchanged(begun, self.steps + 1, self.following.loader)  # before they are sent: it would wait for them
        if self._learned_in != self.comm.membership.epoch:
            self.comm.round(self._learn_now)
        self._weigh()
        self._in_flight = self._copied()
        self.comm.in_flight += 1
        try:
            self._previous.swap(self._exchange.groups, self._trained.names, self._label)
        except RuntimeError:  # the world has broken, or is closed: they are sent again in the next one
            if not self.comm.unsettled:
                raise
        self._exchange.finite.look_at_devices()

    def _copied(self) -> InFlight:
        copies: dict[torch.nn.Parameter, torch.Tensor] = {}
        for group in self._exchange.groups:
            group.arena.take_all(group.params)
            copies |= {p: group.arena.views[p].clone() for p in group.params}
        weights, membership = self._reducer.weights, self.comm.membership
        usual = weights.usual
        return InFlight(self._label, membership.epoch, membership.ranks, copies, weights.mine, weights.by_samples, usual)

    # ---- the means arrive --------------------------------------------------------------------------------------------------

    def land(self, *, at_end: bool = False) -> None:
        """Commit the means that are in flight; they stay where the next step finds them. All ranks call it."""
        flight = self._in_flight
        if flight is None:
            return
        self._warned = self._health.warned
        self.comm.round(lambda: self._arrive(flight), counts=True)
        self._in_flight = None
        self.comm.in_flight -= 1
        self.comm.contributors = tuple(member for member in self.comm.contributors if member in flight.members)

    def _arrive(self, flight: InFlight) -> None:
        """Wait for the means. If the world has changed since they were sent, send the copies again."""
        if flight.epoch == self.comm.membership.epoch:
            for group in self._exchange.groups:
                self._reducer.land(group)
            return
        weights, members = self._reducer.weights, self.comm.membership.ranks
        before = weights.mine, weights.by_samples
        some_have_none = not set(members) <= set(flight.members)  # they count for 0, the others for 1, or by samples
        counted = some_have_none and not flight.by_samples
        try:
            weights.mine, weights.by_samples = flight.mine, flight.by_samples or some_have_none
            self._learn_here(None if counted else flight.usual)
            for group in self._exchange.groups:
                _fill(group.travels, group.flat, {p: group.arena.views[p] for p in group.params}, flight.copies)
                self._reducer.leave(group, flight.label)
            for group in self._exchange.groups:
                self._reducer.land(group)
                group.left = None  # it was sent in the previous step: the next backward does not wait for it
        finally:
            weights.mine, weights.by_samples = before
        if counted:
            weights.forget(flight.usual)  # a number of ranks, and not of samples

    def _learn_now(self) -> None:
        """Nothing is in flight. Means that have landed in another world are kept for the next step."""
        if self._learned_in == self.comm.membership.epoch:
            self._learn(at_step=True)  # other parameters: as without elastic ranks, their first step has nothing to apply
            return
        means = self._previous.means(self._exchange.groups, self._trained.names)
        self._previous.restored = {name: x.clone() for name, x in means.items()}
        self._learn_here(self._reducer.weights.usual)

    def _learn_here(self, usual: float | None) -> None:
        """Make groups for the current world."""
        self._start_again(self._warned, usual)
        self._learn(at_step=True)
        self._learned_in = self.comm.membership.epoch

    # ---- what a newcomer gets ------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        flight, means = self._in_flight, {}
        if flight is None:
            means = self._previous.means(self._exchange.groups, self._trained.names)
        left = None if flight is None else (flight.label, flight.epoch, flight.members, flight.by_samples, flight.usual)
        return super().state() | {"in_flight": left, "means": means}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self._previous.restored = dict(state["means"])
        before, self._in_flight = self._in_flight, None  # of an earlier try to join, in which a rank died
        if state["in_flight"] is not None:
            label, epoch, members, by_samples, usual = state["in_flight"]
            self._in_flight = InFlight(label, epoch, tuple(members), {}, 0.0, by_samples, usual)
        self.comm.in_flight += (self._in_flight is not None) - (before is not None)


def elastic_averager(
    params: Sequence[torch.nn.Parameter],
    names: Sequence[str],
    following: Following,
    sync: AllReduce,
    *,
    wire: Wire | None,
    bucket_bytes: int | None,
    delayed: bool,
) -> ElasticAverager:
    """The averager of an elastic job; `delayed` for double buffering."""
    kind = DelayedElasticAverager if delayed else ElasticAverager
    return kind(params, names, following, sync, wire=wire, bucket_bytes=bucket_bytes)


class Landed(Unfinished):
    """What a checkpoint keeps of a step: its means, which land first."""

    def __init__(self, averager: DelayedElasticAverager) -> None:
        reducer, trained = averager._reducer, averager._trained
        super().__init__(averager._exchange, averager._previous, trained, reducer.weights, delayed=True)
        self._averager = averager

    def state_dict(self) -> dict[str, Any]:
        """All ranks call it."""
        self._averager.land()
        return super().state_dict()


def _fill(
    travels: torch.Tensor,
    flat: torch.Tensor,
    views: dict[torch.nn.Parameter, torch.Tensor],
    copies: dict[torch.nn.Parameter, torch.Tensor],
) -> None:
    """Copy this rank's own gradients to where they are sent from, or zeros where it has none."""
    travels.zero_()
    for p, view in views.items():
        if p in copies:
            beside = travels.storage_offset() + view.storage_offset() - flat.storage_offset()
            travels.as_strided(view.shape, view.stride(), beside).copy_(copies[p])
