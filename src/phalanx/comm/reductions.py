"""Reductions: an all-reduce runs a schedule, or, where all ranks share memory and nobody asked for one, needs none.

Second layer of a communicator. Also the memory that reductions are fastest on, and what runs on the team of a host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch

from phalanx.comm.arguments import check_in_place, check_reduction, kind_of, text_of
from phalanx.comm.choose import for_less, for_world
from phalanx.comm.envelope import is_plain, plain
from phalanx.comm.issuer import Operation, Pending
from phalanx.comm.operations import Operations, digest_of
from phalanx.comm.run import LANES, Form, cut, execute
from phalanx.comm.streams import Lane
from phalanx.native.core import TYPES
from phalanx.native.errors import Disagreement, Refused
from phalanx.native.team import HostTeam
from phalanx.schedule import Collective, Scale, Schedule, ScheduleError, Step, lower, verify

ReduceOp = Literal["sum", "mean", "max", "min"]
T = TypeVar("T")

KEEP = 64 << 20  # bytes of scratch kept between operations


class Reductions(Operations):
    """Sums, means and extremes over all ranks."""

    def _ready(self, algorithm: Schedule | None, *, shared: bool) -> None:
        """Choose what reductions execute; `shared` tells whether the ranks of every host share memory."""
        self._shared = shared
        self._scattering = scattering(self.size)
        self._named: tuple[object, int] = (None, 0)  # the last all-reduce in the calling thread, and the digest of its name
        self._forms: dict[tuple[int, torch.dtype, str], Form] = {}
        self._verified: dict[int, Schedule] = {}
        self._room: dict[tuple[torch.device, int], torch.Tensor] = {}  # bytes: one room for all dtypes
        self._schedule = algorithm or for_world(self._hosts, shared=shared, library=self._transport.library)
        smaller = for_less(self._hosts, shared=shared)
        self._small = smaller[0][1]
        self._smaller = smaller if algorithm is None else smaller[:1]  # the user's own serves all but what is very small
        # all ranks share memory, and nobody asked for a certain schedule: no schedule is needed
        self._direct = self._team if algorithm is None and self.inter_size == 1 else None

    @property
    def schedule(self) -> Schedule:
        """What an all-reduce of more than a few KiB executes."""
        return self._schedule

    def all_reduce(self, x: torch.Tensor, op: ReduceOp = "sum", *, label: str = "") -> torch.Tensor:
        """Sum (mean, max, min) of `x` over the ranks, in place; returns `x`.

        `label` says what `x` is, and is part of the operation's name: ranks that call with different labels get an error.
        """
        if self._direct is not None and self._issuer.idle and not self._debug and _is_simple(x, op) and not self._is_closed():
            # in this thread, at the speed of memory: a thread's wake-up takes longer than all ranks' sum of a few KiB
            self._number += 1
            number, team, comm, ranks = self._number, self._direct, self._name, self._ranks
            key = (x.dtype, x.shape, op, label)

            def describe() -> Operation:  # keeps no tensor and no communicator alive
                return Operation(comm, number, _name_of(*key), dict(enumerate(ranks)), lambda: None, Lane())

            if key != self._named[0]:  # a shape is compared faster than hashed
                self._named = key, _digest_of(*key)
            digest = self._named[1]
            try:
                return self._issuer.directly(lambda: team.all_reduce_about(x, op, digest, number, describe), describe)
            except Disagreement as error:
                raise self._disagreement(error) from None
        self.all_reduce_async(x, op, label=label).wait()
        return x

    def all_reduce_async(self, x: torch.Tensor, op: ReduceOp = "sum", *, label: str = "") -> Pending:
        """Start an all-reduce; leave `x` alone until `wait()`, which returns it. `label` as in `all_reduce`."""
        check_reduction(x, op)
        check_in_place(x)
        schedule = self._schedule_for(x)

        def work(tag: int) -> torch.Tensor:
            self._reduce(x.detach(), op, schedule, tag)
            return x

        compare = not x.is_cpu or x.dtype not in TYPES or self._direct is None  # otherwise shared memory does it anyway
        return self._start(_name_of(x.dtype, x.shape, op, label), work, [x], compare=compare)

    def _schedule_for(self, x: torch.Tensor) -> Schedule:
        if x.is_cuda and self._transport.library:
            return self._schedule  # NCCL has its own way with small messages
        return next((schedule for limit, schedule in self._smaller if x.nbytes <= limit), self._schedule)

    def run(self, schedule: Schedule, x: torch.Tensor) -> torch.Tensor:
        """Execute any schedule for this world on `x`, in place, whatever its size; returns `x`. It is verified the first time."""
        check_reduction(x, "sum")
        check_in_place(x)
        if schedule.world != self.size:
            raise ScheduleError(f"{schedule.name} is for {schedule.world} ranks, but this communicator has {self.size}")
        if not is_plain(x) or not self._transport.can_carry(x):
            raise ValueError(f"run wants a contiguous tensor on a device of the backend, got {text_of(x)} on {x.device}")
        if not (x.is_floating_point() or x.is_complex()) and any(isinstance(op, Scale) for op in schedule.ops()):
            raise TypeError(f"{schedule.name} multiplies by fractions, which {x.dtype} does not hold: call x.float() first")
        if id(schedule) not in self._verified:
            verify(schedule)
            verify(lower(schedule))
            self._verified[id(schedule)] = schedule

        def work(tag: int) -> torch.Tensor:
            self._run(schedule, x.detach().view(-1), "sum", tag)
            return x

        return self._start(f"run({schedule.name}, {text_of(x)})", work, [x], compare=True).wait()

    def reduce_scatter(self, x: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        """Reduce `x`, cut along dim 0 into `size` parts, and return this rank's part; `x` itself is not changed."""
        check_reduction(x, op)
        if x.dim() == 0 or x.shape[0] % self.size:
            raise ValueError(f"reduce_scatter cuts dim 0 into {self.size} equal parts, but the shape is {tuple(x.shape)}: pad it")

        def work(tag: int) -> torch.Tensor:
            whole = x.detach().clone(memory_format=torch.contiguous_format)
            self._reduce(whole, op, self._scattering, tag)
            return whole.chunk(self.size)[self.rank].clone() if whole.numel() else whole[: x.shape[0] // self.size]

        compare = not x.is_cpu or x.dtype not in TYPES
        return self._start(f"reduce_scatter({text_of(x)}, {op})", work, [x], compare=compare).wait()

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        if self._direct is not None:
            team = self._direct
            self._start("barrier()", lambda tag: team.barrier()).wait()
        else:
            self._start("barrier()", lambda tag: self._reduce(torch.zeros(1), "sum", self._small, tag)).wait()

    def _reduce(self, x: torch.Tensor, op: ReduceOp, schedule: Schedule, tag: int) -> None:
        """In place, for any layout and device."""
        if not self._transport.can_carry(x) or not is_plain(x):
            dense = plain(x if self._transport.can_carry(x) else x.cpu())
            self._reduce(dense, op, schedule, tag)
            x.copy_(dense)
            return
        if self._direct is not None and schedule is not self._scattering and x.dtype in TYPES:
            self._direct.all_reduce(x, op)
            return
        flat = x.view(-1)
        if x.dtype is torch.bool:  # a sum of truths is their `or`
            flat, op = flat.view(torch.uint8), "max" if op == "sum" else op
        if op == "mean" and x.dtype is torch.float16:
            flat.div_(self.size)  # divide before the wire: fp16 sums of 1024 ranks overflow
        self._run(schedule, flat, "sum" if op == "mean" else op, tag)
        if op == "mean" and x.dtype is not torch.float16:
            flat.div_(self.size)

    def _run(self, schedule: Schedule, flat: torch.Tensor, op: str, tag: int) -> None:
        form = self._form(schedule, flat)
        if form.cut and flat.numel() % schedule.chunks:
            # library calls want equal parts; Moves do not. Gradients never come here: their arena is padded once
            length = -(-flat.numel() // schedule.chunks)
            padded = flat.new_zeros(length * schedule.chunks)
            # an element stays in its chunk where that matters; otherwise one copy does
            parts = cut(0, flat.numel(), schedule.chunks) if form.placed else [(0, flat.numel())]
            pairs = [(flat[a:b], padded[i * length :][: b - a]) for i, (a, b) in enumerate(parts)]
            for mine, theirs in pairs:
                theirs.copy_(mine)
            self._run(schedule, padded, op, tag)
            for mine, theirs in pairs:
                mine.copy_(theirs)
            return
        execute(
            form.parts,
            flat,
            form.cuts(flat),
            op=op,
            me=self.rank,
            transport=self._transport,
            ranks=self._ranks,
            tag=tag,
            scratch=self._scratch,
            got_on=self._issuer.got_on,
        )

    def _form(self, schedule: Schedule, flat: torch.Tensor) -> Form:
        """How the schedule runs on tensors like `flat`: what the transport can do as one call stays one, the rest is lowered."""
        key = (id(schedule), flat.dtype, flat.device.type)
        if key not in self._forms:
            lowered = lower(schedule, keep=lambda call: self._transport.calls(call, flat, self._ranks))
            calls = self._shared or self._transport.library
            self._forms[key] = Form.of(schedule, lowered, self.rank, calls=calls, scatters=schedule is self._scattering)
        return self._forms[key]

    def _scratch(self, count: int, like: torch.Tensor, lane: int) -> torch.Tensor:
        """Room for `count` elements next to a piece of the user's buffer; only the issuing thread asks."""
        nbytes = count * like.element_size()
        room = self._room.get((like.device, lane))
        if room is None or room.nbytes < nbytes:
            with torch.inference_mode(False):  # what is made under it could not be written to without it
                room = torch.empty(nbytes, dtype=torch.uint8, device=like.device)
            if nbytes <= KEEP:
                self._room[like.device, lane] = room
        return room[:nbytes].view(like.dtype)

    @property
    def multiple(self) -> int:
        """Buffers whose length is a multiple of this many elements need no padding."""
        return self._schedule.chunks * LANES

    def buffer(self, numel: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> torch.Tensor:
        """A flat tensor in the memory that this communicator reduces fastest, not initialised. All ranks call it together."""
        if not self._shared or numel == 0 or dtype not in TYPES or torch.device(device).type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        nbytes, team, loans = numel * dtype.itemsize, self._team, self._loans

        def work(tag: int) -> torch.Tensor:
            if team is None or loans is None:  # alone on its host; an operation all the same, because all ranks must count alike
                return torch.empty(numel, dtype=dtype)
            try:
                return loans.give(lambda: team.allocate(nbytes)).view(dtype)
            except Refused:  # on all ranks of the host alike: their memory limit, most likely
                return torch.empty(numel, dtype=dtype)

        return self._start(f"buffer({nbytes} bytes)", work).wait()

    # ---- one replica per host ------------------------------------------------------------------------------------------------

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks are on one host and share memory."""
        return self._team is not None and self.inter_size == 1

    def shared_buffer(self, numel: int) -> torch.Tensor:
        """Flat float32 zeros that all ranks see and any of them may write. All ranks call it together; needs `shares_memory`."""
        team = self._need_shared_memory("shared_buffer")
        loans = self._loans
        assert loans is not None
        work = lambda tag: loans.give(lambda: team.allocate_one_for_all(numel * 4)).view(torch.float32)  # noqa: E731
        return self._start(f"shared_buffer({numel})", work).wait()

    def on_host(self, name: str, work: Callable[[HostTeam], T]) -> T:
        """Run `work` on the team of ranks that share this host, in the order of all other calls; needs `shares_memory`.

        `name` is what errors call it. All ranks call it together.
        """
        team = self._need_shared_memory(name)
        return self._start(name, lambda tag: work(team)).wait()

    def _need_shared_memory(self, verb: str) -> HostTeam:
        if self._team is None or self.inter_size > 1:
            raise RuntimeError(f"{verb}: the ranks of this communicator do not all share memory (comm.shares_memory tells)")
        return self._team


def _name_of(dtype: torch.dtype, shape: Sequence[int], op: str, label: str) -> str:
    """The name of an all-reduce."""
    return f"all_reduce({kind_of(dtype, shape)}, {op}{', ' + label if label else ''})"


@functools.lru_cache(maxsize=1024)
def _digest_of(dtype: torch.dtype, shape: Sequence[int], op: str, label: str) -> int:
    return digest_of(_name_of(dtype, shape, op, label))


def _is_simple(x: Any, op: str) -> bool:
    """Whether shared memory takes `x` as it is; everything else goes the long way, where it is checked."""
    return (
        isinstance(x, torch.Tensor)
        and x.is_cpu
        and x.layout is torch.strided
        and x.dtype in TYPES
        and x.is_contiguous()
        and (op in ("sum", "max", "min") or (op == "mean" and x.is_floating_point()))
    )


def scattering(size: int) -> Schedule:
    """A reduce-scatter by itself: the first half of a ring."""
    call = Collective("reduce_scatter", tuple(range(size)), range(size))
    return Schedule(f"reduce_scatter({size})", size, size, (Step((call,)),) if size > 1 else ())
