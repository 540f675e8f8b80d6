"""Synchronous data parallelism: while backward still runs, groups of gradients leave, in one order on all ranks.

    backward     a hook per parameter: its gradient is complete, copy it into the arena; the group's last one makes it ready
                 groups leave in index order, never in the order of the hooks, which may differ between ranks
    step         what has not left leaves now (a parameter without a gradient counts as zeros), then wait for all

The first backward is only watched: its order, as rank 0 saw it, becomes the order of the arena and of the groups, on all ranks.
A parameter whose gradient comes in several pieces (two backwards per step, reentrant checkpointing) keeps its group at home until
`step`. Where one comes unexpected, after its group has left, the rank says so in one element at the end of the last group, which
therefore always waits for `step`; then all groups go again. So every group leaves equally often on all ranks, whatever happens on
one of them, and nobody has to ask.

Double buffering, from ChainerMN 1.3: `step` applies the mean of the previous step, while that of this step travels behind the
next forward and backward. It hides a slow network for one step of staleness. Differences: any backend, not only NCCL, and a
second buffer per group instead of a second model. As there, the first step has nothing to apply.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from phalanx.comm.communicator import Communicator
from phalanx.grad.allreduce import AllReduce
from phalanx.grad.arena import Arena
from phalanx.grad.groups import even, growing
from phalanx.grad.measure import Overlap, measure_bucket
from phalanx.grad.replicas import check_replicas, odd, some
from phalanx.grad.travel import Carrier, Group, Journey
from phalanx.grad.wire import carries, check_wire

RECORDS = 10_000  # steps whose times are kept


@dataclass(slots=True)
class StepRecord:
    """Times of one step, in seconds: how long groups were under way, and how long `step` waited for them."""

    wait: float
    under_way: float
    early_bytes: int
    bytes: int


# who watches a parameter. Two that do must not send during backward: the gradient of one is a view that the other reads
_watchers: WeakIdKeyDictionary = WeakIdKeyDictionary()


class Averager:
    """Replaces every gradient of `params` by its mean over the ranks of `comm`."""

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
    ) -> None:
        check_wire(wire)
        self._comm, self._sync, self.delayed = comm, sync, delayed
        self._wire, self._bucket_bytes = wire, bucket_bytes
        self._carrier = Carrier(comm, weighted=sync.weighted)
        self._params: list[torch.nn.Parameter] = []
        self._names: list[str] = []
        self._trained: list[torch.nn.Parameter] = []
        self._groups: list[Group] = []
        self._home: dict[int, tuple[Group, torch.nn.Parameter]] = {}  # by the id of the parameter
        self._learned = False  # the groups are those of the parameters trained now
        self._seen: dict[torch.nn.Parameter, int] = {}  # pieces in which the gradient came, in the order of the first backward
        self._next = 0  # the group that leaves next
        self._marked: set[torch.nn.Parameter] = set()
        self._again = False  # here a gradient came, or was dropped, after its group had left
        self._dropped: set[torch.nn.Parameter] = set()  # after their group had left
        self._alone = True  # nobody else watches these parameters
        self._paused = False
        self._busy = False  # a backward has run since the last synchronisation
        self._finished = False  # this step's synchronisation has happened
        self._overlap = Overlap(False if delayed or sync.fused else sync.overlap)
        self.ready = not delayed  # whether the gradients are a mean that a step may apply
        self._last_end: float | None = None
        self._unused_told = self._overflow_told = False
        self._restored: dict[str, torch.Tensor] = {}  # means of a step before a checkpoint, by name; the next step applies them
        self.records: deque[StepRecord] = deque(maxlen=RECORDS)
        self.journeys: list[Journey] = []  # of the groups that arrived in the last step
        self._hooks: dict[torch.nn.Parameter, list[Any]] = {}
        self._handles: list[Any] = []
        weakref.finalize(self, _remove, self._handles)
        self.watch(params, names)

    def watch(self, params: Sequence[torch.nn.Parameter], names: Sequence[str]) -> None:
        """From now on average the gradients of these; all ranks call it. The groups are learned anew in the next step."""
        self._params, self._names = list(params), list(names)
        self._learned = False
        self._seen = dict.fromkeys(self._seen, 0)
        for p in self._hooks.keys() - set(params):
            _remove(self._hooks.pop(p))
        self._hook()

    def watches(self, params: Sequence[torch.nn.Parameter]) -> bool:
        return _same(self._params, params)

    # ---- during backward ---------------------------------------------------------------------------------------------------

    def _hook(self) -> None:
        """Hook the parameters that are trained now; a frozen one neither travels nor gets a gradient."""
        self._trained = [p for p in self._params if p.requires_grad]
        me = weakref.ref(self)  # a parameter outlives its optimizer, and must not keep it
        for p in self._trained:
            if p not in self._hooks:
                self._hooks[p] = [
                    p.register_hook(_calling_before(me, id(p))),
                    p.register_post_accumulate_grad_hook(_calling_after(me)),
                ]
                self._handles.extend(self._hooks[p])
            watchers = _watchers.setdefault(p, weakref.WeakSet())
            watchers.add(self)
            if len(watchers) > 1:
                for other in list(watchers):
                    other._alone = False

    def _before(self, key: int) -> None:
        """A gradient is about to be added to a parameter: not while its group is on the wire."""
        group, p = self._home.get(key, (None, None))
        if group is None or p is None or group.left is None:
            return
        if group.pending is not None:
            self._carrier.arrive(group)
        if group.arena.lost(p):  # by model.zero_grad(), say, of which we are not told
            self._recall(group, [p])

    def _after(self, p: torch.nn.Parameter) -> None:
        """The gradient of `p` is complete, for this backward."""
        self._busy = True
        group, _ = self._home.get(id(p), (None, None))
        if not self._learned and not self._paused:
            self._seen[p] = self._seen.get(p, 0) + 1
        if group is None:
            return
        group.arena.take(p)
        if group.left is not None:  # too late for its group, which from now on waits for the step
            self._again = True
            group.surprised = p not in self._dropped
            return
        if p.grad is not None and p.grad.requires_grad:  # it is going to be differentiated: its group waits for the step
            group.missing += p in self._marked
            self._marked.discard(p)
            return
        if self._paused or p in self._marked:
            return
        self._marked.add(p)
        group.missing -= 1
        if self._overlap.now and self._alone:
            self._leave_in_order()

    def _leave_in_order(self) -> None:
        while self._next < len(self._groups) - 1:  # the last one has to wait, it carries the flag
            group = self._groups[self._next]
            if group.missing > 0 or not group.early:
                return
            self._carrier.leave(group, flag=self._again if group is self._groups[-1] else None)
            self._next += 1

    # ---- the step --------------------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """After it, every gradient is the mean. Called by all ranks; again before `next_step` it does nothing."""
        if self._finished and not self._busy:
            return
        begun = time.perf_counter()
        early = sum(group.flat.nbytes for group in self._groups if group.left is not None)
        if not self._learned or not _same(self._trained, [p for p in self._params if p.requires_grad]):
            self._learn()
        self._tell_unused()
        if self.delayed:
            self._swap_with_previous()
        else:
            self._complete()
        for group in self._groups:
            for p in group.params:
                p.grad = group.arena.views[p]
        self._tell_overflow()
        self._finish_step(begun, early)

    def collect(self) -> list[Arena]:
        """The arenas, with this rank's gradients in them, for who sums them himself. All ranks call it, instead of the above."""
        begun = time.perf_counter()
        if not self._learned or not _same(self._trained, [p for p in self._params if p.requires_grad]):
            self._learn()
        if not self._finished or self._busy:  # otherwise they are means already, and the mean of equal ones is the same
            self._tell_unused()
            for group in self._groups:
                group.arena.take_all(group.params)
            self._finish_step(begun, 0)
        return list(dict.fromkeys(group.arena for group in self._groups))

    def _complete(self) -> None:
        """What has not left leaves now; wait for all."""
        early = [number for number, group in enumerate(self._groups) if group.left is not None]
        for number in early:
            group = self._groups[number]
            self._recall(group, [p for p in group.params if group.arena.lost(p)])
        for group in self._groups:
            if group.left is None:
                group.arena.take_all(group.params)
                self._carrier.leave(group, flag=self._again if group is self._groups[-1] else None)
        self._carrier.arrive_all(self._groups)
        # only where groups may leave early, and that is the same on all ranks
        if self._overlap.now and len(self._groups) > 1 and bool(self._groups[-1].travels[-1] != 0):
            self._agree(early)
            for group in self._groups[:-1]:
                group.arena.take_all(group.params)
                group.overflowed = False  # what counts is what comes now
                self._carrier.leave(group, flag=self._again if group is self._groups[-1] else None)
            self._carrier.arrive_all(self._groups)
        self._carrier.settle()

    def _recall(self, group: Group, params: Sequence[torch.nn.Parameter]) -> None:
        """The user drops or replaces gradients that have left: what is there at the step counts."""
        if params:
            if group.pending is not None:
                self._carrier.arrive(group)
            self._again = True
            self._dropped.update(params)

    def drop(self) -> None:
        """The gradients are about to be zeroed."""
        if not self.delayed:
            for group in self._groups:
                if group.left is not None:
                    self._recall(group, group.params)
        self._finished = False

    def _agree(self, early: list[int]) -> None:
        """After a surprise, on any rank: which groups wait for the step from now on, and whether the means can be corrected."""
        dropped = [i for i, p in enumerate(self._params) if p in self._dropped]
        told = self._comm.allgather_obj((dropped, early, [group.surprised for group in self._groups]))
        for group, surprised in zip(self._groups, zip(*(own[2] for own in told))):
            group.early, group.surprised = group.early and not any(surprised), False
        # a mean can be taken back only by all: who did not drop it has nothing else to send
        if any(own[0] for own in told) and (who := odd([own[:2] for own in told])):
            raise RuntimeError(
                f"gradients were dropped or replaced after they had left, and not alike on all ranks: {who} from rank 0. Call "
                "opt.synchronize() before you change gradients, or use sync=phalanx.AllReduce(overlap=False)"
            )

    def _swap_with_previous(self) -> None:
        """This step's gradients leave, the previous step's means take their place."""
        self.ready = all(group.pending is not None for group in self._groups)
        for group in self._groups:
            group.arena.take_all(group.params)
            if group.pending is not None:
                self._carrier.arrive(group)
                previous = group.travels.clone()
                group.travels.copy_(group.flat)
                group.flat.copy_(previous)
            else:
                group.travels.copy_(group.flat)
        self._apply_restored()
        self._carrier.settle()
        for group in self._groups:
            self._carrier.leave(group, flag=self._again if group is self._groups[-1] else None)

    def _apply_restored(self) -> None:
        """Instead of the previous step's means, which this process has not seen."""
        restored, self._restored = self._restored, {}
        names = {id(p): name for p, name in zip(self._params, self._names)}
        if not self.ready and restored.keys() == {names[id(p)] for p in self._trained}:
            for group in self._groups:
                for p in group.params:
                    group.arena.views[p].copy_(restored[names[id(p)]])
            self.ready = True

    def state_dict(self) -> dict[str, Any]:
        """What the next step needs of the ones before it: with double buffering, the means that are under way. Waits for them."""
        means: dict[str, torch.Tensor] = {}
        names = {id(p): name for p, name in zip(self._params, self._names)}
        if self.delayed and self._groups and all(group.pending is not None for group in self._groups):
            for group in self._groups:
                self._carrier.land(group)
                means |= {names[id(p)]: _beside(group.arena.views[p], group.flat, group.travels) for p in group.params}
        return {"means": means or self._restored, "usual": self._carrier.usual}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; on any number of ranks, because what is saved are means."""
        self._restored = {name: x.clone() for name, x in state["means"].items()} if self.delayed else {}
        self._carrier.usual = state["usual"]

    def _finish_step(self, begun: float, early: int) -> None:
        now = time.perf_counter()
        self.journeys, self._carrier.journeys = self._carrier.journeys, []
        if self._sync.record:
            total = sum(group.flat.nbytes for group in self._groups)
            first = min((group.left for group in self._groups if group.left is not None), default=now)
            self.records.append(StepRecord(wait=now - begun, under_way=now - first, early_bytes=early, bytes=total))
        if not self._overlap.decided and self._last_end is not None:
            self._overlap.tried(now - self._last_end, self._comm)
        self._last_end = time.perf_counter()
        self._busy, self._finished, self._again = False, True, False
        self._dropped.clear()
        self._alone = self._alone or all(len(_watchers[p]) == 1 for p in self._trained)
        self._marked.clear()
        self._next = 0
        for group in self._groups:
            group.missing, group.left = len(group.params), None

    def mean(self, loss: Any) -> Any:
        """The mean of a loss over the ranks; all ranks call it."""
        return self._carrier.mean(loss)

    @property
    def alone(self) -> bool:
        """Whether nobody else watches these parameters."""
        return self._alone

    def next_step(self) -> None:
        """The gradients were used."""
        self._finished = False

    @property
    def weight(self) -> float:
        """What the gradients of this rank count for in the mean."""
        return self._carrier.weight

    @weight.setter
    def weight(self, samples: float) -> None:
        if not self.delayed and any(group.left is not None for group in self._groups):
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

    def _learn(self) -> None:
        """Check that the replicas are equal, agree on an order, and lay out the memory."""
        self._forget()
        options = [repr(replace(self._sync, record=False)), self.delayed, str(self._wire), self._bucket_bytes]
        check_replicas(self._params, self._names, options, self._comm)
        number = {p: i for i, p in enumerate(self._params)}
        # the gradients that rank 0 has not seen come last, from the back of the network
        order = [number[p] for p in dict.fromkeys([*self._seen, *reversed(self._params)]) if p in number and p.requires_grad]
        several = [number[p] for p, pieces in self._seen.items() if pieces > 1 and p in number]
        device = self._trained[0].device if self._trained else torch.device("cpu")
        order, bucket = self._comm.bcast_obj((order, self._bucket_bytes or measure_bucket(self._comm, device)))
        late = {i for own in self._comm.allgather_obj(several) for i in own}
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for i in order:
            p = self._params[i]
            kinds.setdefault((p.dtype, p.device), []).append(i)
        made: list[tuple[int, Group]] = []
        for members in kinds.values():
            params = [self._params[i] for i in members]
            sizes = [p.numel() * p.element_size() for p in params]
            runs = growing(len(params), self._sync.growing) if self._sync.growing is not None else even(sizes, bucket)
            arena = Arena(params, runs, multiple=self._comm.multiple, allocate=self._comm.buffer)
            for run, flat in zip(runs, arena.groups):
                own = [params[i] for i in run]
                early = not any(members[i] in late for i in run)
                travels = self._comm.buffer(flat.numel(), flat.dtype, flat.device) if self.delayed else flat
                wire = self._comm.buffer(flat.numel(), self._wire, flat.device) if self._wire and carries(flat) else None
                group = Group(arena, flat, own, travels, wire, early, missing=len(own))
                made.append((order.index(members[run[-1]]), group))
        made.sort(key=lambda item: item[0])  # by when the last gradient came; equal on all ranks
        self._groups = [group for _, group in made]
        self._home = {id(p): (group, p) for group in self._groups for p in group.params}
        self._learned = True

    def _forget(self) -> None:
        """Let what is under way arrive, and start again with the parameters that are trained now."""
        if self.delayed:
            self._carrier.arrive_all(self._groups)
        elif self._groups:
            self._complete()  # on some ranks more groups have left than on others: now all have
        self._groups, self._home = [], {}
        self._marked.clear()
        self._dropped.clear()
        self._next, self._again = 0, False
        self.ready = not self.delayed
        self._hook()


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two lists have the same objects: `==` of tensors is another thing."""
    return len(some) == len(others) and all(x is y for x, y in zip(some, others))


def _beside(view: torch.Tensor, flat: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """What `other` has where `view` is in `flat`."""
    return other.as_strided(view.shape, view.stride(), other.storage_offset() + view.storage_offset() - flat.storage_offset())


def _finite(x: torch.Tensor | None) -> bool:
    return x is None or bool(torch.isfinite(x).all())


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def _calling_before(me: weakref.ref[Averager], key: int) -> Callable[[torch.Tensor], None]:
    def before(_: torch.Tensor) -> None:
        averager = me()
        if averager is not None:
            averager._before(key)

    return before


def _calling_after(me: weakref.ref[Averager]) -> Callable[[Any], None]:
    def after(p: Any) -> None:
        averager = me()
        if averager is not None:
            averager._after(p)

    return after
