"""Synchronous data parallelism: when `backward()` returns, every gradient is the mean over the ranks.

    during backward     a hook per parameter copies the complete gradient into the arena; a group is sent when all of it is there
    end of backward     the engine's callback sends the remaining groups (a missing gradient counts as zeros), then waits for all
    step                a rank that had no backward joins here, and sends zeros

Each backward has one exchange, so all ranks must call `backward()` equally often between two steps, or not at all. If they don't,
they find out: every message carries its step and exchange in a label, and messages with different labels never match.

During the first backward nothing is sent. The order in which rank 0 saw its gradients becomes the order of the arena and of the
groups on all ranks. `simple.py` does the same job in 20 lines, without hooks, groups and overlap. `exchange.py` sends the groups.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from phalanx.comm.communicator import Communicator
from phalanx.grad.allreduce import AllReduce
from phalanx.grad.arena import Arena
from phalanx.grad.double_buffer import Previous
from phalanx.grad.drift import Difference, OptimizerState
from phalanx.grad.engine import EndOfBackward
from phalanx.grad.exchange import Exchange, overflowed
from phalanx.grad.flags import Said
from phalanx.grad.health import Health
from phalanx.grad.hooks import Hooks
from phalanx.grad.measure import Overlap, is_small, overlap_of
from phalanx.grad.record import Records, StepRecord
from phalanx.grad.reducer import GroupReducer, TransferTime
from phalanx.grad.replicas import ReplicaError
from phalanx.grad.sparse import average_sparse
from phalanx.grad.trained import Trained
from phalanx.grad.twice import AVERAGED, SecondAverage
from phalanx.grad.unfinished import Unfinished
from phalanx.grad.untouched import Untouched
from phalanx.grad.wires import Wire, check_any_wire


class Averager:
    """Replaces every gradient of `params` by its mean over the ranks of `comm`.

    With `in_backward=False` nothing is sent before `step`. The fused step needs that, because it sums the gradients itself.
    """

    _reducer_kind = GroupReducer

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        comm: Communicator,
        sync: AllReduce,
        *,
        wire: Wire | None,
        bucket_bytes: int | None,
        delayed: bool,
        in_backward: bool = True,
        sparse: bool = False,
    ) -> None:
        check_any_wire(wire)
        self._comm, self._sync, self._wire, self.delayed = comm, sync, wire, delayed
        self.in_backward = in_backward and not delayed
        self._sparse = sparse  # gradients are sparse tensors, and so are their means
        self._trained = Trained(comm, sync, wire=wire, bucket_bytes=bucket_bytes, delayed=delayed)
        self._reducer = self._reducer_kind(comm, weighted=sync.weighted)
        self._untouched = Untouched(comm.rank)
        self._overlap = Overlap(False if delayed or sync.fused else overlap_of(sync, params, comm))
        at_the_end = self._overlap.told is False and not delayed and comm.shares_memory and is_small(params)
        self._exchange = Exchange(comm, self._reducer, self._untouched, at_the_end=at_the_end)
        self._previous = Previous(self._reducer)
        self.unfinished = Unfinished(self._exchange, self._previous, self._trained, self._reducer.weights, delayed=delayed)
        self._health, self._second = Health(comm, sync), SecondAverage(comm, AVERAGED)
        self._hooks = Hooks(None if at_the_end else self._exchange.before, self._after)
        self._end = EndOfBackward(self._end_backward)
        self._refused: ReplicaError | None = None  # raised in a backward, kept for the step
        self._paused = self._busy = False  # busy: a gradient was computed since the last exchange
        self.steps = self._exchanges = 0  # steps so far, and exchanges since the last one
        self._exchanged = False  # whether the gradients are means already, in this step or evaluation of its closure
        self._said = Said()  # the flags of all ranks in the last exchange
        self._records = Records()
        self.transfers: list[TransferTime] = []  # of the groups that arrived in the last exchange
        self.watch(params, names)

    def watch(self, params: Sequence[torch.nn.Parameter], names: Sequence[str]) -> None:
        """Average the gradients of `params` from now on. All ranks call it, and agree on new groups in the next exchange."""
        self._trained.set(params, names)
        self._untouched.names, self._exchanged = self._trained.names, False
        self._hook()

    def watches(self, params: Sequence[torch.nn.Parameter]) -> bool:
        return self._trained.are(params)

    def _hook(self) -> None:
        self._hooks.on(self._trained.look(), among=self._trained.params)

    @property
    def _in_backward_now(self) -> bool:
        """Whether gradients are averaged in backward. Only the newest optimizer of a parameter may do that."""
        return self.in_backward and not self._hooks.superseded

    @property
    def ready(self) -> bool:
        """Whether the gradients are a mean that a step may apply. In the first step of double buffering they are not."""
        return not self.delayed or self._previous.ready

    # ---- during backward ---------------------------------------------------------------------------------------------------

    def _after(self, p: torch.nn.Parameter) -> None:
        """Autograd has completed the gradient of `p` for this backward."""
        self._busy = True
        if p in self._hooks.superseded:  # a newer optimizer averages it
            return
        if not self._paused and self._in_backward_now:
            self._end.expect()
        if self.steps == 0 and self._hooks.alone:
            self._second.expect(self._trained.now)
        if not self._paused:
            self._trained.saw(p)
        may_leave = self._exchange.take(p, accumulates=self._paused)
        if may_leave and self._overlap.now and self._in_backward_now and self._trained.agreed and self._hooks.alone:
            self._exchange.leave_in_order(self._label)

    def _end_backward(self) -> None:
        if self._busy:
            try:
                self._average(at_step=False)
            except ReplicaError as error:  # on all ranks. `step()` raises it, where people expect it
                self._refused = error

    # ---- the exchange --------------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Make every gradient the mean. All ranks call it. It does nothing if backward has already averaged."""
        if self._refused is not None:
            error, self._refused = self._refused, None
            raise error
        while not self._exchanged or self._busy or self._said.mixed:  # mixed: some ranks are still in a backward
            self._average(at_step=True)

    def _average(self, *, at_step: bool) -> None:
        begun, early = time.perf_counter(), self._exchange.early_bytes
        if at_step and not self.delayed:
            # The hooks ran without a callback at the end of backward: backward failed or was nested, or a newer optimizer has
            # the same parameters.
            self._exchange.check_untouched("before it was averaged; call opt.synchronize() first")
        if self._sparse:
            average_sparse(self._trained.now, self._comm)
        else:
            self._make_means(at_step=at_step)
            for arena in self._exchange.arenas:
                arena.give_all()
            self._health.warn_of_overflow(self._trained.names, overflowed(self._exchange.groups), self._wire)
        self._finish(begun, early)

    def _make_means(self, *, at_step: bool) -> None:
        if self._trained.changed:
            self._learn(at_step=at_step)
        self._health.warn_of_unused(self._trained.names)
        if self.delayed:
            self._previous.swap(self._exchange.groups, self._trained.names, self._label)
            self._exchange.finite.look_at_devices()
        else:
            self._said = self._exchange.complete(self._label, at_step=at_step, at_once=not self._overlap.now)

    @property
    def _label(self) -> str:
        return f"gradients of step {self.steps + 1}, backward {self._exchanges + 1}"

    def drop_graphs(self) -> None:
        """Before an update: replace gradients that have a graph by the exact means."""
        for arena in self._exchange.arenas:
            arena.drop_graphs()

    def collect(self) -> list[Arena]:
        """Return the arenas with this rank's own gradients, for the fused step. All ranks call it instead of `synchronize`."""
        begun = time.perf_counter()
        if self._trained.changed:
            self._learn(at_step=True)
        groups = self._exchange.groups
        if not self._exchanged or self._busy:  # if not, they are means already, and averaging them again changes nothing
            self._exchange.check_untouched("before step(), which sums with AllReduce(fused=True); call opt.synchronize() first")
            self._health.warn_of_unused(self._trained.names)
            for group in groups:
                group.arena.take_all(group.params)
            self._finish(begun, 0)
        return self._exchange.arenas

    def _finish(self, begun: float, early: int) -> None:
        now = time.perf_counter()
        self.transfers, self._reducer.transfers = self._reducer.transfers, []
        if self._sync.record:
            self._records.add(self._exchange.groups, begun=begun, ended=now, early_bytes=early)
        self._overlap.exchange_ended(now, self._comm)
        self._exchanges += 1
        self._exchanged, self._busy = True, False
        self._hooks.look_for_others()
        self._exchange.finish()

    def _learn(self, *, at_step: bool) -> None:
        """Finish the exchange in flight, then agree on groups for the parameters that are trained now."""
        if self.delayed:
            self._reducer.arrive_all(self._exchange.groups)
        elif self._exchange.groups and self._in_backward_now:
            # Some ranks have sent more groups than others. Now all ranks send all of them.
            self._exchange.complete(self._label, at_step=at_step, at_once=not self._overlap.now)
        self._exchange.start_with([])
        self._previous.ready = False
        self._hook()
        if not self._hooks.superseded:
            self._health.warn_of_equal_gradients(self._trained.now)
        self._exchange.start_with(self._trained.agree())

    # ---- the step --------------------------------------------------------------------------------------------------------------

    def next_evaluation(self) -> None:
        """The optimizer is about to call a closure, which computes new gradients."""
        self._exchanged = False

    def next_step(self) -> None:
        """The update is done."""
        if self._said.ill:
            self._health.warn_of_nan(self._exchange.finite, self.steps + 1)
        self.steps += 1
        self._said = Said()
        self._exchanges, self._exchanged = 0, False
        self._records.next_step()

    def check_replicas(self, state: OptimizerState) -> None:
        """After an update: compare the parameters of the ranks, every `check_every` steps."""
        self._health.check_drift(self._trained.names, state, self.steps)

    @property
    def differences(self) -> tuple[Difference, ...]:
        return tuple(self._health.drift.found)

    def drop(self) -> None:
        """The user is about to zero the gradients. A step without another backward then sends zeros."""
        self._exchanged = False
        self._exchange.forget_what_is_at_home()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Only accumulate gradients in this block, without communication."""
        self._paused, before = True, self._paused
        try:
            yield
        finally:
            self._paused = before

    @property
    def records(self) -> Sequence[StepRecord]:
        """Times of the last steps."""
        return self._records.all

    def mean(self, loss: Any) -> Any:
        """The mean of a loss over the ranks; all ranks call it."""
        return self._reducer.weights.mean(loss)

    @property
    def weight(self) -> float:
        """The weight of this rank's gradients in the mean."""
        return self._reducer.weights.mine

    @weight.setter
    def weight(self, samples: float) -> None:
        if not self.delayed and (self._exchanged or self._exchange.begun):
            raise RuntimeError(f"opt.weight={samples}: gradients were already sent with {self.weight}; set it before backward")
        self._reducer.weights.mine = float(samples)
