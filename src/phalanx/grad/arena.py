"""Flat memory for gradients: every parameter's gradient lies in one buffer per dtype and device, in the order of travel.

Autograd makes a fresh gradient after `zero_grad()` (torch's default sets it to None), so presetting the views would not hold.
Instead the fresh gradient is copied into its place when it is complete, and `p.grad` becomes an alias of that place: as fast as
accumulating in place, with nothing to zero.

The alias is the user's. It has a version counter of its own, which only the user's writes move, and it may be sent elsewhere
(`p.grad.data = ...`, `model.double()`): where the gradient lies is decided by its address, never by which object it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from phalanx._torch_private import foreach_copy_
from phalanx.comm.heap import keep_freed_memory

ALIGN = 64  # bytes: a cache line, so that two groups never share one
FLAGS = 4  # elements at the end of every arena's last group that are no gradients: the ranks' words to each other

Allocate = Callable[[int, torch.dtype, torch.device], torch.Tensor]


class Arena:
    """The gradients of `params`, all of one dtype and device, cut into `groups` of consecutive ones.

    Every group begins on a cache line and its length is a multiple of `multiple` elements, which is what the schedule wants:
    padding happens here, once, and nowhere else.
    """

    def __init__(
        self, params: Sequence[torch.nn.Parameter], groups: Sequence[range], *, multiple: int, allocate: Allocate
    ) -> None:
        first = params[0]
        if first.is_cpu:
            keep_freed_memory()
        unit = max(1, ALIGN // first.element_size())
        starts, spans, at = [], [], 0
        for group in groups:
            begin = at
            for i in group:
                starts.append(at)
                at += _round_up(params[i].numel(), unit)
            spare = FLAGS if group is groups[-1] else 0
            at = begin + _round_up(at - begin + spare, multiple)
            spans.append((begin, at))
            at = _round_up(at, unit)
        self.flat = allocate(at, first.dtype, first.device)
        self.flat.zero_()  # the padding stays zero
        self.groups = [self.flat[begin:end] for begin, end in spans]
        self.starts = dict(zip(params, starts))
        self.views = self.views_of(self.flat)
        self._aliases: dict[torch.nn.Parameter, torch.Tensor] = {}  # those that were given last
        self._places = {p: (view.data_ptr(), view.stride()) for p, view in self.views.items()}
        self._graphs: dict[torch.nn.Parameter, torch.Tensor] = {}  # gradients with a graph, as `give_all` left them

    def views_of(self, flat: torch.Tensor) -> dict[torch.nn.Parameter, torch.Tensor]:
        """A tensor of the shape and layout of every parameter, in a buffer laid out as this one."""
        return {p: _view(flat, start, p) for p, start in self.starts.items()}

    def fits(self, p: torch.nn.Parameter) -> bool:
        """Whether `p` is still what it was when its place was made; `model.double()`, say, changes it."""
        return p.dtype is self.flat.dtype and p.device == self.flat.device and p.shape == self.views[p].shape

    def has(self, p: torch.nn.Parameter, grad: torch.Tensor) -> bool:
        """Whether `grad` lies in the place of p's gradient."""
        return (
            grad.layout is torch.strided
            and (grad.data_ptr(), grad.stride()) == self._places[p]
            and grad.dtype is self.flat.dtype
            and grad.shape == p.shape
        )

    def take(self, p: torch.nn.Parameter) -> None:
        """Bring the gradient of `p` into its place, zeros if there is none; `p.grad` is there from then on.

        Except for a gradient with a graph, after `backward(create_graph=True)`: it is copied, and stays as it is.
        """
        grad = p.grad
        if grad is None:
            self.views[p].zero_()
        elif self.has(p, grad):
            return
        else:
            dense = grad.detach() if grad.layout is torch.strided else grad.detach().to_dense()
            inside = 0 <= dense.data_ptr() - self.flat.data_ptr() < self.flat.nbytes
            self.views[p].copy_(dense.clone() if inside else dense)  # inside: a transposed view of its own place, say
        if (grad is None or not grad.requires_grad) and self.fits(p):
            self.give(p)

    def take_all(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Bring in all of these; one that was frozen meanwhile counts as zeros and keeps what it has."""
        plain = {p: p.grad for p in params if p.requires_grad and p.grad is not None and self._is_plain(p, p.grad)}
        if plain:  # in one call: a copy of a small gradient takes less time than to ask for it
            foreach_copy_([self.views[p] for p in plain], list(plain.values()))
        for p in params:
            if p in plain:
                self.give(p)
            elif p.requires_grad:
                self.take(p)
            else:
                self.views[p].zero_()

    def _is_plain(self, p: torch.nn.Parameter, grad: torch.Tensor) -> bool:
        """Whether `grad` is memory of its own, as autograd makes it."""
        if grad.layout is not torch.strided or grad.requires_grad or not self.fits(p):
            return False
        return not 0 <= grad.data_ptr() - self.flat.data_ptr() < self.flat.nbytes

    def give(self, p: torch.nn.Parameter) -> None:
        """Make what lies in its place the gradient of `p`."""
        if p.grad is None or not self.has(p, p.grad):
            alias = self._aliases.get(p)
            if alias is None or not self.has(p, alias):  # none yet, or the user has sent it elsewhere
                view = self.views[p]
                # a tensor of its own on the same memory: a view's version would count our writes, too
                alias = torch.empty(0, dtype=view.dtype, device=view.device)
                alias.set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())
                self._aliases[p] = alias
            p.grad = alias

    def give_all(self) -> None:
        """Make all means the gradients of their parameters.

        A gradient with a graph keeps it: its value becomes the mean, its derivative stays its own.
        """
        self._graphs.clear()
        for p, view in self.views.items():
            grad = p.grad
            if not p.requires_grad:
                continue
            if grad is not None and grad.requires_grad:
                p.grad = self._graphs[p] = grad + (view - grad.detach())
            else:
                self.give(p)

    def drop_graphs(self) -> None:
        """Before an update: replace a gradient with a graph, which is only about the mean, by the exact mean."""
        for p, grad in self._graphs.items():
            if p.grad is grad:
                self.give(p)
        self._graphs.clear()


def _view(flat: torch.Tensor, start: int, p: torch.nn.Parameter) -> torch.Tensor:
    """The place of p's gradient, in p's own memory layout where that is dense (channels_last stays channels_last)."""
    dense = p.is_contiguous() or torch.empty_like(p, device="meta").stride() == p.stride()
    if dense and not p.is_contiguous():
        return flat.as_strided(p.shape, p.stride(), flat.storage_offset() + start)
    return flat[start : start + p.numel()].view(p.shape)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
