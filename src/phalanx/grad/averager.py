"""Synchronous data parallelism: when `backward()` returns, every gradient is the mean over the ranks.

    backward     a hook per parameter: its gradient is complete, bring it into the arena; the group's last one makes it ready
                 groups leave in index order, never in the order of the hooks, which may differ between ranks
    its end      the engine calls: what has not left leaves now (a missing gradient counts as zeros), then wait for all
    step         a rank that had no backward joins here, with zeros

One such exchange takes place per backward, so ranks call `backward()` equally often between two steps, or not at all. They notice
where they do not: every message is labelled with its step and exchange, and messages with different labels never meet.

The first backward is only watched: its order, as rank 0 saw it, becomes the order of the arena and of the groups, on all ranks.
A gradient may come in several pieces (reentrant checkpointing). Where a piece comes unexpected, after its group has left, the
rank says so in one element at the end of the last group, which therefore always waits for the end; then all groups go again, and
from the next backward on that group waits for the end, too. So every group leaves equally often on all ranks, whatever happens on
one of them, and nobody has to ask.

    the last elements of the last group, 0 or not      meaning, if any rank wrote it
    SENT_AGAIN                                         a gradient came after its group had left: all groups go again
    IN_BACKWARD, AT_STEP                               both: some ranks have joined at their step, and wait for more backwards
    NOT_FINITE                                         a rank has NaN or inf in its own gradients
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from phalanx.comm.communicator import Communicator
from phalanx.grad.allreduce import AllReduce
from phalanx.grad.arena import FLAGS, Arena
from phalanx.grad.double_buffer import Previous
from phalanx.grad.engine import backward_number, is_inner_backward, when_backward_ends
from phalanx.grad.health import SAMPLE, check_drift, warn_of_equal_gradients, warn_of_nan
from phalanx.grad.hooks import Hooks
from phalanx.grad.layout import Kind, agree_on_groups, kind_of
from phalanx.grad.measure import Overlap
from phalanx.grad.replicas import ReplicaError, some
from phalanx.grad.sparse import average_sparse
from phalanx.grad.travel import Carrier, Group, Journey
from phalanx.grad.wire import check_wire

RECORDS = 10_000  # steps whose times are kept
SENT_AGAIN, IN_BACKWARD, AT_STEP, NOT_FINITE = range(-FLAGS, 0)


@dataclass(slots=True)
class StepRecord:
    """Times of one step, in seconds: how long groups were under way, and how long the rank waited for them, from `begun` on."""

    wait: float
    under_way: float
    early_bytes: int
    bytes: int
    begun: float = 0.0  # by time.perf_counter()


class Print(NamedTuple):
    """A gradient as it was: which object, at which address, written to how often."""

    grad: torch.Tensor | None
    address: int
    version: int

    @staticmethod
    def of(grad: torch.Tensor | None) -> Print:
        return Print(None, 0, 0) if grad is None else Print(grad, grad.data_ptr(), grad._version)

    def matches(self, grad: torch.Tensor | None) -> bool:
        return grad is self.grad and (grad is None or (grad.data_ptr(), grad._version) == self[1:])


class Averager:
    """Replaces every gradient of `params` by its mean over the ranks of `comm`.

    `in_backward` is False where somebody else sums the gradients: then nothing happens before `step`, nor with double buffering.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        comm: Communicator,
        sync: AllReduce,
        *,
        wire: torch.dtype | None,
        bucket_bytes: int | None,
        delayed: bool,
        in_backward: bool = True,
        sparse: bool = False,
    ) -> None:
        check_wire(wire)
        self._comm, self._sync, self.delayed = comm, sync, delayed
        self._wire, self._bucket_bytes = wire, bucket_bytes
        self.in_backward = in_backward and not delayed
        self._sparse = sparse  # gradients are sparse, and stay so
        self._carrier = Carrier(comm, weighted=sync.weighted)
        self._previous = Previous(self._carrier)
        self._hooks = Hooks(self._before, self._after)
        self._params: list[torch.nn.Parameter] = []
        self._names: list[str] = []
        self._trained: list[torch.nn.Parameter] = []
        self._kinds: list[Kind] = []  # of the trained ones, when the groups were agreed on
        self._groups: list[Group] = []
        self._home: dict[int, tuple[Group, torch.nn.Parameter]] = {}  # by the id of the parameter
        self._learned = False  # the groups are those of the parameters trained now
        self._seen: dict[torch.nn.Parameter, int] = {}  # pieces in which the gradient came, in the order of the first backward
        self._next = 0  # the group that leaves next
        self._marked: set[torch.nn.Parameter] = set()
        self._again = False  # here a gradient came after its group had left
        self._gone: dict[torch.nn.Parameter, Print] = {}  # gradients as they were when they were complete, or left
        self._graphs: dict[torch.nn.Parameter, torch.Tensor] = {}  # gradients with a graph whose value is the mean
        self._refused: ReplicaError | None = None  # found at the end of a backward
        self._backward = -1  # the number of the last backward whose end we wait for
        self._paused = False
        self._busy = False  # a gradient has come since the last exchange
        self.steps = self._exchanges = 0  # steps so far, and exchanges since the last one
        self._exchanged = False  # the gradients of this step, or of this evaluation of its closure
        self._mixed = False  # in the last exchange some ranks were in a backward, and others at their step
        self._ill = self._mine_ill = self._ill_told = False  # the last exchange had NaN or inf from some rank, from this one
        self._overlap = Overlap(False if delayed or sync.fused else sync.overlap)
        self._last_end: float | None = None
        self._unused_told = self._overflow_told = self._compared = False
        self.records: deque[StepRecord] = deque(maxlen=RECORDS)
        self._record: StepRecord | None = None  # of this step so far
        self.journeys: list[Journey] = []  # of the groups that arrived in the last exchange
        self.watch(params, names)

    def watch(self, params: Sequence[torch.nn.Parameter], names: Sequence[str]) -> None:
        """From now on average the gradients of these; all ranks call it. The groups are learned anew in the next exchange."""
        self._params, self._names = list(params), list(names)
        self._learned = self._exchanged = False
        self._seen = dict.fromkeys(self._seen, 0)
        self._hook()

    def watches(self, params: Sequence[torch.nn.Parameter]) -> bool:
        return _same(self._params, params)

    def _hook(self) -> None:
        """Hook the parameters that are trained now; a frozen one neither travels nor gets a gradient."""
        self._trained = [p for p in self._params if p.requires_grad]
        self._hooks.on(self._trained, among=self._params)

    @property
    def alone(self) -> bool:
        """Whether nobody else watches these parameters."""
        return self._hooks.alone

    @property
    def _in_backward_now(self) -> bool:
        """Whether gradients are averaged in backward, where at most one optimizer per parameter may do it: the youngest."""
        return self.in_backward and not self._hooks.superseded

    @property
    def ready(self) -> bool:
        """Whether the gradients are a mean that a step may apply: not in the first step of double buffering."""
        return not self.delayed or self._previous.ready

    # ---- during backward ---------------------------------------------------------------------------------------------------

    def _before(self, key: int) -> None:
        """A gradient is about to be added to a parameter: not while its group is on the wire."""
        group, _ = self._home.get(key, (None, None))
        if group is not None and group.left is not None and group.pending is not None:
            self._arrive(group)

    def _after(self, p: torch.nn.Parameter) -> None:
        """The gradient of `p` is complete, for this backward."""
        self._busy = True
        if p in self._hooks.superseded:  # a younger optimizer has it, too, and makes its mean
            return
        if not self._paused and self._in_backward_now:
            self._wait_for_the_end()
        if not self._paused and not self._learned:
            self._seen[p] = self._seen.get(p, 0) + 1
        group, _ = self._home.get(id(p), (None, None))
        if group is None:
            return
        group.arena.take(p)
        if not self._paused:
            self._gone[p] = Print.of(p.grad)
        if group.left is not None:  # too late for its group, which from now on waits for the end
            self._again = group.surprised = True
            return
        if p.grad is not None and p.grad.requires_grad:  # it has a graph: its group waits for the end
            group.missing += p in self._marked
            self._marked.discard(p)
            return
        if self._paused or p in self._marked:
            return
        self._marked.add(p)
        group.missing -= 1
        if self._overlap.now and self._in_backward_now and self._learned and self.alone:
            self._leave_in_order()

    def _wait_for_the_end(self) -> None:
        number = backward_number()
        if number != self._backward:
            self._backward = number
            me = weakref.ref(self)
            when_backward_ends(lambda: _end_backward(me))

    def _leave_in_order(self) -> None:
        while self._next < len(self._groups) - 1:  # the last one waits for the end, it carries the flags
            group = self._groups[self._next]
            if group.missing > 0 or not group.early:
                return
            group.arena.take_all(group.params)  # a hook of the user's may have replaced a gradient since it came
            self._gone |= {p: Print.of(p.grad) for p in group.params}
            self._carrier.leave(group, self._label)
            group.left_early = True
            self._next += 1

    def _end_backward(self) -> None:
        if self._busy and not is_inner_backward():
            try:
                self._exchange(at_step=False)
            except ReplicaError as error:  # all ranks have it; a step is what it forbids, and where people expect it
                self._refused = error

    def _arrive(self, group: Group) -> None:
        """Wait for a group; what the user wrote to its gradients meanwhile is in no mean, or half of it is."""
        self._carrier.arrive(group)
        if group.left_early:
            self._check_untouched(group.params, "while it was under way to the other ranks")

    def _check_untouched(self, params: Sequence[torch.nn.Parameter], when: str) -> None:
        for p in params:
            if p not in self._gone:
                continue
            dropped = p.grad is None and not self._home[id(p)][0].left_early  # it counts as zeros
            if not dropped and not self._gone[p].matches(p.grad):
                name = self._names[next(i for i, q in enumerate(self._params) if q is p)]
                raise RuntimeError(
                    f"rank {self._comm.rank}: the gradient of {name} was changed {when}. Change gradients after backward() has "
                    "returned, when they are the mean; before it has, only inside opt.no_sync()"
                )

    # ---- the exchange --------------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """After it, every gradient is the mean. Called by all ranks; after a backward that has seen to it, it does nothing."""
        if self._refused is not None:
            error, self._refused = self._refused, None
            raise error
        while self._owed():
            self._exchange(at_step=True)

    def _owed(self) -> bool:
        """Whether this step needs another exchange: it had none, gradients have come since, or ranks had to wait for others."""
        return not self._exchanged or self._busy or self._mixed

    def _exchange(self, *, at_step: bool) -> None:
        begun = time.perf_counter()
        early = sum(group.flat.nbytes for group in self._groups if group.left is not None)
        if at_step and not self.delayed:
            # hooks have run, and nobody called at the end of backward: it failed, or ran inside another one, or this optimizer
            # is not the youngest of its parameters
            self._check_untouched(self._trained, "before it was averaged; call opt.synchronize() first")
        if self._sparse:
            average_sparse(self._trained, self._comm)
        else:
            if self._stale():
                self._learn(at_step=at_step)
            self._tell_unused()
            if self.delayed:
                self._previous.swap(self._groups, dict(zip(self._params, self._names)), self._label)
            else:
                self._complete(at_step=at_step)
            self._hand_out()
            self._tell_overflow()
        self._finish_exchange(begun, early)

    @property
    def _label(self) -> str:
        return f"gradients of step {self.steps + 1}, backward {self._exchanges + 1}"

    def _stale(self) -> bool:
        """Whether parameters were added, frozen, or changed in type or layout since the groups were agreed on."""
        trained = [p for p in self._params if p.requires_grad]
        return (
            not self._learned
            or not _same(self._trained, trained)
            or any(kind_of(p) != kind for p, kind in zip(trained, self._kinds))
        )

    def _complete(self, *, at_step: bool) -> None:
        """What has not left leaves now; wait for all."""
        if not self._groups:
            return
        last = self._groups[-1]
        for group in self._groups[:-1]:
            if group.left is None:
                group.arena.take_all(group.params)
                self._carrier.leave(group, self._label)
        last.arena.take_all(last.params)
        self._mine_ill = self._carrier.counts and not bool(torch.isfinite(last.flat[:SAMPLE]).all())
        self._carrier.leave(last, self._label, flags=[self._again, not at_step, at_step, self._mine_ill])
        for group in self._groups:
            if group.pending is not None:
                self._arrive(group)
        said = [word != 0 for word in last.travels[-FLAGS:].tolist()]
        self._mixed = said[IN_BACKWARD] and said[AT_STEP]
        self._ill = said[NOT_FINITE]
        if said[SENT_AGAIN]:
            self._agree_on_late_groups()
            for group in self._groups[:-1]:
                group.arena.take_all(group.params)
                group.overflowed = False  # what counts is what comes now
                self._carrier.leave(group, f"{self._label}, again")
            self._carrier.arrive_all(self._groups)
        self._carrier.settle()

    def _agree_on_late_groups(self) -> None:
        """After a surprise, on any rank: which groups wait for the end of backward from now on."""
        told = self._comm.allgather_obj([group.surprised for group in self._groups])
        for group, surprised in zip(self._groups, zip(*told)):
            group.early, group.surprised = group.early and not any(surprised), False

    def _hand_out(self) -> None:
        """Make the means the gradients. One with a graph keeps it: its value becomes the mean, its derivative stays its own."""
        self._graphs.clear()
        for group in self._groups:
            for p in group.params:
                grad = p.grad
                if not p.requires_grad:
                    continue
                if grad is not None and grad.requires_grad:
                    p.grad = grad + (group.arena.views[p] - grad.detach())
                    self._graphs[p] = p.grad
                else:
                    group.arena.give(p)

    def drop_graphs(self) -> None:
        """Before an update: the exact mean in the place of a gradient that had a graph, and only about the same value."""
        for p, grad in self._graphs.items():
            if p.grad is grad:
                self._home[id(p)][0].arena.give(p)
        self._graphs.clear()

    def collect(self) -> list[Arena]:
        """The arenas, with this rank's gradients in them, for who sums them himself. All ranks call it, instead of the above."""
        begun = time.perf_counter()
        if self._stale():
            self._learn(at_step=True)
        if not self._exchanged or self._busy:  # otherwise they are means already, and the mean of equal ones is the same
            self._check_untouched(self._trained, "before step(), which sums with AllReduce(fused=True); opt.synchronize() first")
            self._tell_unused()
            for group in self._groups:
                group.arena.take_all(group.params)
            self._finish_exchange(begun, 0)
        return list(dict.fromkeys(group.arena for group in self._groups))

    def _finish_exchange(self, begun: float, early: int) -> None:
        now = time.perf_counter()
        self.journeys, self._carrier.journeys = self._carrier.journeys, []
        if self._sync.record:
            self._add_to_record(begun, now, early)
        if not self._overlap.decided and self._last_end is not None:
            self._overlap.tried(now - self._last_end, self._comm)
        self._last_end = time.perf_counter()
        self._exchanges += 1
        self._exchanged = True
        self._busy = self._again = False
        self._hooks.look_for_others()
        self._gone.clear()
        self._marked.clear()
        self._next = 0
        for group in self._groups:
            group.missing, group.left, group.left_early = len(group.params), None, False

    def _add_to_record(self, begun: float, now: float, early: int) -> None:
        first = min((group.left for group in self._groups if group.left is not None), default=now)
        own = StepRecord(now - begun, now - first, early, sum(group.flat.nbytes for group in self._groups), begun)
        if self._record is None:
            self._record = own
            self.records.append(own)
        else:  # several backwards in one step
            self._record.wait += own.wait
            self._record.under_way += own.under_way
            self._record.early_bytes += own.early_bytes
            self._record.bytes += own.bytes

    # ---- the step --------------------------------------------------------------------------------------------------------------

    def next_evaluation(self) -> None:
        """A closure is about to be called: gradients as of a step of its own."""
        self._exchanged = False

    def next_step(self) -> None:
        """The gradients were used."""
        if self._ill and not self._ill_told:
            self._ill_told = True
            warn_of_nan(self._mine_ill, self._comm, self.steps + 1)
        self._ill = False
        self.steps += 1
        self._exchanges, self._exchanged, self._mixed, self._record = 0, False, False, None

    def check_replicas(self) -> None:
        """After an update: every so many steps the ranks compare their parameters."""
        every = self._sync.check_every
        if every and self._comm.size > 1 and self.steps and self.steps % every == 0:
            check_drift(self._params, self._names, self._comm, self.steps)

    def drop(self) -> None:
        """The gradients are about to be zeroed, whatever they were: a step without another backward sends zeros."""
        self._exchanged = False
        left = {p for group in self._groups if group.left is not None for p in group.params}
        self._gone = {p: gone for p, gone in self._gone.items() if p in left}

    def state_dict(self) -> dict[str, Any]:
        """What the next step needs of the ones before it: with double buffering, the means that are under way. Waits for them."""
        means = self._previous.means(self._groups, dict(zip(self._params, self._names))) if self.delayed else {}
        return {"means": means, "usual": self._carrier.usual}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; on any number of ranks, because what is saved are means."""
        self._previous.restored = {name: x.clone() for name, x in state["means"].items()} if self.delayed else {}
        self._carrier.usual = state["usual"]

    def mean(self, loss: Any) -> Any:
        """The mean of a loss over the ranks; all ranks call it."""
        return self._carrier.mean(loss)

    @property
    def weight(self) -> float:
        """What the gradients of this rank count for in the mean."""
        return self._carrier.weight

    @weight.setter
    def weight(self, samples: float) -> None:
        if not self.delayed and (self._exchanged or any(group.left is not None for group in self._groups)):
            raise RuntimeError(
                f"opt.weight={samples}: gradients have left with {self._carrier.weight} already; set it before backward"
            )
        self._carrier.weight = float(samples)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Backward inside only accumulates."""
        self._paused, before = True, self._paused
        try:
            yield
        finally:
            self._paused = before

    def _tell_unused(self) -> None:
        unused = [name for p, name in zip(self._params, self._names) if p.requires_grad and p.grad is None]
        if unused and not self._unused_told:
            self._unused_told = True
            warnings.warn(
                f"rank {self._comm.rank}: no gradient for {len(unused)} parameter(s), {some(unused)}; "
                "they count as zeros in the mean. Told once",
                stacklevel=5,
            )

    def _tell_overflow(self) -> None:
        over = {id(p) for group in self._groups if group.overflowed for p in group.params}
        for group in self._groups:
            group.overflowed = False
        if self._overflow_told or self._wire is None or not over:
            return
        self._overflow_told = True
        bad = [name for p, name in zip(self._params, self._names) if id(p) in over and not _finite(p.grad)]
        warnings.warn(
            f"the mean gradient of {some(bad)} is not finite: on the way as {self._wire} it exceeded "
            f"{torch.finfo(self._wire).max:g}, or it was not finite before. Use wire=torch.bfloat16, or a GradScaler. Told once",
            stacklevel=5,
        )

    # ---- learning the groups, once ---------------------------------------------------------------------------------------------

    def _learn(self, *, at_step: bool) -> None:
        """Let what is under way arrive, and agree on groups for the parameters that are trained now."""
        if self.delayed:
            self._carrier.arrive_all(self._groups)
        elif self._groups and self._in_backward_now:
            self._complete(at_step=at_step)  # on some ranks more groups have left than on others: now all have
        self._groups, self._home = [], {}
        self._marked.clear()
        self._next, self._again = 0, False
        self._previous.ready = False
        self._hook()
        if not self._compared and self._comm.size > 1 and not self._hooks.superseded:
            self._compared = True
            warn_of_equal_gradients([p.grad.detach() for p in self._trained if p.grad is not None], self._comm)
        self._groups = agree_on_groups(
            self._params,
            self._names,
            self._seen,
            self._comm,
            self._sync,
            wire=self._wire,
            bucket_bytes=self._bucket_bytes,
            delayed=self.delayed,
        )
        self._home = {id(p): (group, p) for group in self._groups for p in group.params}
        self._kinds = [kind_of(p) for p in self._trained]
        self._learned = True


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two lists have the same objects: `==` of tensors is another thing."""
    return len(some) == len(others) and all(x is y for x, y in zip(some, others))


def _finite(x: torch.Tensor | None) -> bool:
    return x is None or bool(torch.isfinite(x).all())


def _end_backward(me: weakref.ref[Averager]) -> None:
    averager = me()
    if averager is not None:
        averager._end_backward()
