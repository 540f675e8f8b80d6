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

import hashlib
import time
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from phalanx.comm.communicator import Communicator
from phalanx.comm.issuer import Pending
from phalanx.grad.arena import Arena
from phalanx.grad.groups import even, growing
from phalanx.grad.wire import carries, check_wire, pack, unpack

LATENCY_SHARE = 0.05  # of a group's time that its latency may take, when its size is chosen by measuring
SMALLEST, LARGEST = 1 << 20, 32 << 20  # bytes of a group so chosen
TRIALS = 3  # steps with, and then without overlap, before the faster way is kept


class ReplicaError(RuntimeError):
    """Ranks that should hold the same parameters do not."""


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Average gradients over all ranks.

    `growing`: Fujitsu's groups, whose k-th boundary is after growing * k**3 tensors, instead of groups of equal bytes. `overlap`:
    let groups leave during backward; None measures both ways in the first steps and keeps the faster. `weighted`: the mean over
    samples instead of over ranks; set `opt.weight` to the size of each local batch. `record`: keep times for `opt.report()`.
    `fused`: where all ranks share memory, keep one replica of parameters and momentum for all of them, and update it while the
    gradients are summed (torch.optim.SGD only; elsewhere it is told once, and the step is the usual one).
    """

    growing: int | None = None
    overlap: bool | None = None
    weighted: bool = False
    record: bool = False
    fused: bool = False

    def __post_init__(self) -> None:
        if self.growing is not None and (not isinstance(self.growing, int) or self.growing < 1):
            raise ValueError(f"growing={self.growing!r}: the number of tensors of the first group, at least 1, or None")


@dataclass(slots=True, eq=False)
class Group:
    """Gradients that travel together, and where they are on their way."""

    arena: Arena
    flat: torch.Tensor
    params: list[torch.nn.Parameter]
    travels: torch.Tensor  # `flat`, or with double buffering the buffer beside it
    wire: torch.Tensor | None  # the 16-bit companion of `travels`
    early: bool  # may leave during backward
    missing: int = 0
    left: float | None = None  # when it left, in this step
    pending: Pending | None = None
    surprised: bool = False  # a gradient came after it had left
    overflowed: bool = False


@dataclass(slots=True)
class StepRecord:
    """Times of one step, in seconds: how long groups were under way, and how long `step` waited for them."""

    wait: float
    under_way: float
    early_bytes: int
    bytes: int


@dataclass(slots=True)
class Overlap:
    """Whether groups leave during backward: told, or found out by trying both."""

    told: bool | None
    times: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    now: bool = True

    def __post_init__(self) -> None:
        self.now = True if self.told is None else self.told

    @property
    def decided(self) -> bool:
        return self.told is not None

    def tried(self, seconds: float, comm: Communicator) -> None:
        """A step took so long. After enough of them on both sides, all ranks choose the side that is faster for the slowest."""
        self.times[self.now].append(seconds)
        if len(self.times[self.now]) <= TRIALS:  # one more than TRIALS: the first after a switch does not count
            return
        if self.now:
            self.now = False
            return
        medians = torch.tensor([median(self.times[way][1:]) for way in (True, False)], dtype=torch.float64)
        comm.all_reduce(medians, op="max")
        self.told = self.now = bool(medians[0] < medians[1])


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
        self._weights: tuple[torch.Tensor, Pending] | None = None  # the sum of this step's weights, under way
        self._usual: torch.Tensor | None = None  # the sum of an earlier step's weights
        self._weight: float = 1.0
        self.records: list[StepRecord] = []
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
            self._arrive(group)
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
            self._leave(group)
            self._next += 1

    # ---- travelling --------------------------------------------------------------------------------------------------------

    def _leave(self, group: Group) -> None:
        group.left = time.perf_counter()
        x, weighted = group.travels, self._sync.weighted
        if weighted:
            self._weigh(x)
        if group is self._groups[-1]:
            x[-1] = float(self._again)
        if group.wire is not None:
            group.pending = self._comm.all_reduce_async(pack(x, group.wire, 1.0 if weighted else 1 / self._comm.size))
        else:
            group.pending = self._comm.all_reduce_async(x, op="sum" if weighted else "mean")

    def _weigh(self, x: torch.Tensor) -> None:
        """Multiply by this rank's share of the samples, as far as it is known: a 16-bit sum of gradient * samples overflows."""
        if self._weights is None:
            total = torch.tensor(self._weight, dtype=torch.float64, device=x.device)
            self._weights = total, self._comm.all_reduce_async(total)
        if self._usual is None:
            total, pending = self._weights
            pending.wait()
            self._usual = _positive(total)
        if self._weight:
            x.mul_((self._weight / self._usual).to(x.device))
        else:
            x.zero_()  # the mean over an empty batch is NaN, and so is 0 * NaN

    def _arrive(self, group: Group) -> None:
        assert group.pending is not None
        group.pending.wait()
        group.pending = None
        if group.wire is not None and not unpack(group.wire, group.travels):
            group.overflowed = True
        if self._weights is not None and self._usual is not None:
            total, pending = self._weights
            pending.wait()
            group.travels.mul_((self._usual / _positive(total)).to(group.travels.device))

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
                self._leave(group)
        self._arrive_all()
        # only where groups may leave early, and that is the same on all ranks
        if self._overlap.now and len(self._groups) > 1 and bool(self._groups[-1].travels[-1] != 0):
            self._agree(early)
            for group in self._groups[:-1]:
                group.arena.take_all(group.params)
                group.overflowed = False  # what counts is what comes now
                self._leave(group)
            self._arrive_all()
        self._settle_weights()

    def _arrive_all(self) -> None:
        for group in self._groups:
            if group.pending is not None:
                self._arrive(group)

    def _recall(self, group: Group, params: Sequence[torch.nn.Parameter]) -> None:
        """The user drops or replaces gradients that have left: what is there at the step counts."""
        if params:
            if group.pending is not None:
                self._arrive(group)
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
        if any(own[0] for own in told) and (odd := _odd([own[:2] for own in told])):
            raise RuntimeError(
                f"gradients were dropped or replaced after they had left, and not alike on all ranks: {odd} from rank 0. Call "
                "opt.synchronize() before you change gradients, or use sync=phalanx.AllReduce(overlap=False)"
            )

    def _swap_with_previous(self) -> None:
        """This step's gradients leave, the previous step's means take their place."""
        self.ready = all(group.pending is not None for group in self._groups)
        for group in self._groups:
            group.arena.take_all(group.params)
            if group.pending is not None:
                self._arrive(group)
                previous = group.travels.clone()
                group.travels.copy_(group.flat)
                group.flat.copy_(previous)
            else:
                group.travels.copy_(group.flat)
        self._settle_weights()
        for group in self._groups:
            self._leave(group)

    def _settle_weights(self) -> None:
        if self._weights is not None:
            self._usual, self._weights = _positive(self._weights[0]), None

    def _finish_step(self, begun: float, early: int) -> None:
        now = time.perf_counter()
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
        """The mean of a loss, a number or a tensor with one, over the ranks as the gradients' mean; all ranks call it."""
        if not isinstance(loss, float | int | torch.Tensor):
            return loss
        pair = torch.tensor([float(loss.detach() if isinstance(loss, torch.Tensor) else loss), 1.0], dtype=torch.float64)
        weight = self._weight if self._sync.weighted else 1.0
        pair = pair * weight if weight else torch.zeros_like(pair)
        total, weights = self._comm.all_reduce(pair)
        mean = total / _positive(weights)
        return mean.to(loss) if isinstance(loss, torch.Tensor) else float(mean)

    def next_step(self) -> None:
        """The gradients were used."""
        self._finished = False

    @property
    def weight(self) -> float:
        """What the gradients of this rank count for in the mean."""
        return self._weight

    @weight.setter
    def weight(self, samples: float) -> None:
        if not self.delayed and any(group.left is not None for group in self._groups):
            raise RuntimeError(f"opt.weight={samples}: gradients have left with {self._weight} already; set it before backward")
        self._weight = float(samples)

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
                f"rank {self._comm.rank}: no gradient for {len(unused)} parameter(s), {_some(unused)}; "
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
            f"the mean gradient of {_some(bad)} is not finite: on the way as {self._wire} it exceeded "
            f"{torch.finfo(self._wire).max:g}, or it was not finite before. Use wire=torch.bfloat16, or a GradScaler. Told once",
            stacklevel=5,
        )

    # ---- learning the groups, once ---------------------------------------------------------------------------------------------

    def _learn(self) -> None:
        """Check that the replicas are equal, agree on an order, and lay out the memory."""
        self._forget()
        self._check_replicas()
        number = {p: i for i, p in enumerate(self._params)}
        # the gradients that rank 0 has not seen come last, from the back of the network
        order = [number[p] for p in dict.fromkeys([*self._seen, *reversed(self._params)]) if p in number and p.requires_grad]
        several = [number[p] for p, pieces in self._seen.items() if pieces > 1 and p in number]
        order, bucket = self._comm.bcast_obj((order, self._bucket_bytes or self._measure_bucket()))
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
            self._arrive_all()
        elif self._groups:
            self._complete()  # on some ranks more groups have left than on others: now all have
        self._groups, self._home = [], {}
        self._marked.clear()
        self._dropped.clear()
        self._next, self._again = 0, False
        self.ready = not self.delayed
        self._hook()

    def _check_replicas(self) -> None:
        """Raise, on all ranks, where parameters or options differ."""
        options = [repr(replace(self._sync, record=False)), self.delayed, str(self._wire), self._bucket_bytes]
        kinds = [(list(p.shape), str(p.dtype), list(p.stride()), p.requires_grad) for p in self._params]
        prints = [_fingerprint(p) for p in self._params]
        if not _odd(self._comm.allgather_obj(_digest((options, kinds, prints)))):
            return
        if odd := _odd(self._comm.allgather_obj(_digest(options))):
            raise ReplicaError(f"the options of create_multi_node_optimizer differ between ranks: {odd} from rank 0")
        remedy = "Build the model after phalanx.seed_everything(seed) on all ranks, or call phalanx.bcast_parameters(model, comm)"
        if odd := _odd(self._comm.allgather_obj(_digest(kinds))):
            raise ReplicaError(
                f"the number of parameters, their shapes, dtypes, memory formats or requires_grad differ between ranks: {odd} "
                "from rank 0"
            )
        told = self._comm.allgather_obj(prints)
        names = [name for name, own in zip(self._names, zip(*told)) if len(set(own)) > 1]
        raise ReplicaError(f"the parameters differ between ranks: {_odd(told)} from rank 0, in {_some(names)}. {remedy}")

    def _measure_bucket(self) -> int:
        """The size at which latency is a small share of a group's time; 25 MB of noise would be a bad guess, so take medians."""
        if self._comm.size == 1:
            return LARGEST
        device = self._trained[0].device if self._trained else torch.device("cpu")
        times = []
        for count in (SMALLEST // 4, 4 * SMALLEST // 4):
            x = self._comm.buffer(count, torch.float32, device).zero_()
            samples = []
            for _ in range(4):
                begun = time.perf_counter()
                self._comm.all_reduce(x)
                if x.is_cuda:
                    torch.cuda.synchronize(device)
                samples.append(time.perf_counter() - begun)
            times.append(median(samples[1:]))
        per_byte = max((times[1] - times[0]) / (3 * SMALLEST), 1e-12)
        latency = max(times[0] - per_byte * SMALLEST, 0.0)
        return int(min(LARGEST, max(SMALLEST, latency / per_byte / LATENCY_SHARE)))


def _fingerprint(p: torch.Tensor) -> int:
    """A number that differs for different contents, or the same in another order."""
    dense = torch.view_as_real(p.detach().resolve_conj()) if p.is_complex() else p.detach()
    return zlib.crc32(dense.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data)


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _odd(values: Sequence[Any]) -> str:
    """The ranks whose value is not that of rank 0, as words; empty if there is none."""
    odd = [str(rank) for rank, value in enumerate(values) if value != values[0]]
    return f"{'rank' if len(odd) == 1 else 'ranks'} {', '.join(odd)}" if odd else ""


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two lists have the same objects: `==` of tensors is another thing."""
    return len(some) == len(others) and all(x is y for x, y in zip(some, others))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _finite(x: torch.Tensor | None) -> bool:
    return x is None or bool(torch.isfinite(x).all())


def _positive(total: torch.Tensor) -> torch.Tensor:
    return torch.where(total > 0, total, torch.ones_like(total))


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
