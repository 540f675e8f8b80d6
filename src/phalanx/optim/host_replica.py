"""One replica of parameters and momentum per host, of which each rank updates its part.

Ranks that share a host all hold the same parameters, W times over, and compute the same update, W times over. Here parameters and
momentum lie once in memory that all ranks see, and the optimizer's own `step` runs, on each rank, on its part of the elements:

    elements of all parameters, in order      [ weight 1          | bias 1 | weight 2              ]
    moved by                                  [ rank 0      ][ rank 1           ][ rank 2          ]

Gradients are averaged as ever, so nothing about them changes. Nor does anything about the parameters: they are the same objects
with their memory elsewhere, mapped privately (copy_on_write.py). A rank that writes to them gets pages of its own, as if it had
had a replica of its own from the beginning; the next step notices it, on all ranks, and is the usual one. A part begins at a
multiple of CUT elements of a tensor, so that torch's vector loops treat every element as they would in the whole: the same bits
result. LARS, which needs the norms of whole tensors, has parts of whole tensors.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from phalanx._torch_private import has_step_hooks, other_views
from phalanx.comm.communicator import Communicator
from phalanx.optim.copy_on_write import HostMemory
from phalanx.optim.lars import Lars

CUT = 256  # elements: more than any vector loop of torch takes at once
ALIGN = 64  # bytes: a cache line
MOMENTUM = "momentum_buffer"  # the only state of torch.optim.SGD and of phalanx.Lars


@dataclass(frozen=True, slots=True)
class Part:
    """Elements start..stop, in the order of memory, of a tensor."""

    tensor: int
    start: int
    stop: int


def parts_of(counts: Sequence[int], rank: int, size: int, *, whole: bool = False) -> tuple[Part, ...]:
    """What `rank` of `size` updates of tensors with so many elements: an equal share, up to CUT elements.

    `whole`: tensors are not divided; each belongs to the rank in whose share its middle lies.
    """
    low, high = (sum(counts) * r // size for r in (rank, rank + 1))
    parts, begin = [], 0
    for tensor, count in enumerate(counts):
        if whole:
            start, stop = 0, count if low <= begin + count // 2 < high else 0
        else:
            start, stop = (count if bound - begin >= count else max(bound - begin, 0) // CUT * CUT for bound in (low, high))
        if start < stop:
            parts.append(Part(tensor, start, stop))
        begin += count
    return tuple(parts)


def objection(optimizer: torch.optim.Optimizer) -> str:
    """Why `optimizer.step` cannot be run on parts of the parameters; empty if it can."""
    if type(optimizer) is Lars:
        if not optimizer.moves_natively:
            return "only the native core's LARS has the same bits on tensors that have lost their shape"
    elif type(optimizer) is not torch.optim.SGD:
        return f"the optimizer is {type(optimizer).__name__}, not torch.optim.SGD or phalanx.Lars"
    return altered(optimizer)


def altered(optimizer: torch.optim.Optimizer) -> str:
    """Why a step of `optimizer` is not what its class says; empty if it is."""
    own_step = vars(optimizer).get("step")
    if own_step is not None and not hasattr(own_step, "_wrapped_by_lr_sched"):  # a scheduler only counts the calls
        return "the optimizer's step was replaced"
    if has_step_hooks(optimizer):
        return "the optimizer has step hooks"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "differentiable updates write no memory"
    return ""


def immovable(x: torch.Tensor) -> str:
    """Why the memory of a tensor cannot be replaced by another one without anybody noticing; empty if it can."""
    if type(x) not in (torch.nn.Parameter, torch.Tensor) or not x.is_cpu or x.layout is not torch.strided or not x.is_leaf:
        return f"a {type(x).__name__} on {x.device}"
    if torch.empty_like(x, device="meta").stride() != x.stride():
        return "a tensor whose memory has gaps"
    if x.is_shared():  # type: ignore[no-untyped-call]
        return "memory that is shared already"
    if other_views(x) != 0:
        return "memory of which somebody else has a view"
    return ""


class Fitness(IntEnum):
    """Whether a step can be done on the replica. The ranks take the worst of theirs."""

    FIT = 0
    FORKED = 1  # the children of a fork would see the step: it needs other memory
    UNFIT = 2  # somebody wrote to his parameters, moved them, or changed the optimizer


class HostReplica:
    """The parameters of `optimizer` and their momentum, in `memory`, which all ranks of `comm` make at the same time."""

    def __init__(self, optimizer: torch.optim.Optimizer, comm: Communicator, memory: HostMemory) -> None:
        self._optimizer, self._comm, self._memory = optimizer, comm, memory
        self._params = params_of(optimizer)
        moments = [moment_of(optimizer, p) for p in self._params]
        places = places_of([*self._params, *moments])[0]
        self._pieces: dict[torch.Tensor, tuple[Part, torch.Tensor]] = {}
        self._state: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)  # of the pieces
        with torch.no_grad():
            counts = [p.numel() for p in self._params]
            for part in parts_of(counts, comm.rank, comm.size, whole=type(optimizer) is Lars):
                p, moment = self._params[part.tensor], moments[part.tensor]
                piece = self._common(places[part.tensor], p, part)
                self._pieces[p] = part, piece
                if moment is not None:
                    self._state[piece][MOMENTUM] = self._common(places[len(moments) + part.tensor], moment, part)
            comm.barrier()  # all have copied their parts
            for i, (p, moment) in enumerate(zip(self._params, moments)):
                p.data = memory.own(places[i], p.shape, p.stride(), p.dtype)
                if moment is not None:
                    place = places[len(moments) + i]
                    optimizer.state[p][MOMENTUM] = memory.own(place, moment.shape, moment.stride(), moment.dtype)
        self._layouts = [_layout(p) for p in self._params]
        self._moments = [moment_of(optimizer, p) for p in self._params]

    def _common(self, place: int, x: torch.Tensor, part: Part) -> torch.Tensor:
        """The part of `x`, copied to the common memory at `place`."""
        piece = self._memory.common(place + part.start * x.element_size(), part.stop - part.start, x.dtype)
        return piece.copy_(_flat(x, part))

    def fitness(self) -> Fitness:
        """What this rank finds."""
        optimizer, params = self._optimizer, params_of(self._optimizer)
        if (
            len(params) != len(self._params)
            or any(p is not mine for p, mine in zip(params, self._params))
            or any(_layout(p) != mine for p, mine in zip(params, self._layouts))
            or any(moment_of(optimizer, p) is not mine for p, mine in zip(params, self._moments))
            or any(not _fits(p.grad, p) for p in params)
            or lacks_momentum(optimizer)
            or objection(optimizer)
            or self._memory.written()
        ):
            return Fitness.UNFIT
        return Fitness.FORKED if self._memory.forked() else Fitness.FIT

    def step(self) -> None:
        """One step on all ranks' parameters. All ranks are in it, and none goes on before it is done."""
        with self._on_pieces():
            self._optimizer.step()
        # as after any step: who goes backward once more, through the same graph, learns that it is too late
        torch.autograd.graph.increment_version(self._params)
        self._comm.barrier()

    @contextmanager
    def _on_pieces(self) -> Iterator[None]:
        """The optimizer has only the pieces of this rank, and their state."""
        optimizer = self._optimizer
        before: list[dict[str, Any]] = [
            {key: group[key] for key in ("params", "skipped") if key in group} for group in optimizer.param_groups
        ]
        state = optimizer.state
        try:
            optimizer.state = self._state
            for group in optimizer.param_groups:
                mine = [i for i, p in enumerate(group["params"]) if p in self._pieces]
                if "skipped" in group:  # LARS: by their numbers in the group
                    skipped = set(group["skipped"])
                    group["skipped"] = [number for number, i in enumerate(mine) if i in skipped]
                group["params"] = [self._with_gradient(group["params"][i]) for i in mine]
            yield
        finally:
            optimizer.state = state
            for group, own in zip(optimizer.param_groups, before):
                group.update(own)
            for _, piece in self._pieces.values():
                piece.grad = None

    def _with_gradient(self, p: torch.Tensor) -> torch.Tensor:
        part, piece = self._pieces[p]
        piece.grad = None if p.grad is None else _flat(p.grad, part)
        return piece


def params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Of all groups, in their order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def moment_of(optimizer: torch.optim.Optimizer, p: torch.Tensor) -> torch.Tensor | None:
    """The momentum of `p`, if it has one yet."""
    return optimizer.state[p].get(MOMENTUM) if p in optimizer.state else None


def lacks_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the next step makes a momentum buffer, which has no place yet."""
    return any(
        group["momentum"] and p.grad is not None and moment_of(optimizer, p) is None
        for group in optimizer.param_groups
        for p in group["params"]
    )


def places_of(tensors: Sequence[torch.Tensor | None]) -> tuple[list[int], int]:
    """Where each begins, in bytes, in a memory for all of them, and how long that is."""
    places, at = [], 0
    for x in tensors:
        places.append(at)
        at += 0 if x is None else -(-x.nbytes // ALIGN) * ALIGN
    return places, at


def fingerprint(tensors: Sequence[torch.Tensor | None]) -> int:
    """A number that differs for different contents."""
    value = 0
    for x in tensors:
        if x is not None:
            value = zlib.crc32(_flat(x.detach(), Part(0, 0, x.numel())).view(torch.uint8).numpy().data, value)
    return value


def options_print(optimizer: torch.optim.Optimizer) -> int:
    """A number that differs where the next step would do something else."""
    options = [
        (
            [(key, str(value)) for key, value in group.items() if key not in ("params", "param_names")],
            [p.grad is None for p in group["params"]],
        )
        for group in optimizer.param_groups
    ]
    return zlib.crc32(repr(options).encode())


def _layout(p: torch.Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return p.data_ptr(), p.shape, p.stride()


def _fits(grad: torch.Tensor | None, p: torch.Tensor) -> bool:
    """Whether parts of the gradient are parts of the parameter."""
    return grad is None or (
        grad.layout is torch.strided and grad.stride() == p.stride() and grad.dtype is p.dtype and not grad.requires_grad
    )


def _flat(x: torch.Tensor, part: Part) -> torch.Tensor:
    """Some elements of a dense tensor, in the order of its memory."""
    return x.as_strided((part.stop - part.start,), (1,), x.storage_offset() + part.start)
