"""Flat memory for gradients: one buffer per dtype and device holds all gradients, in the order in which they are sent.

After `zero_grad()` autograd allocates a new gradient (torch's default sets it to None), so `p.grad` cannot be a view that we set
once. Instead we copy each complete gradient to its place and make `p.grad` an alias of that place. This is as fast as
accumulating in place, and nothing has to be zeroed.

The alias belongs to the user. It has its own version counter, which only the user's writes increment. The user may also point it
elsewhere (`p.grad.data = ...`, `model.double()`), so we identify a gradient by its address and never by the tensor object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from phalanx._torch_private import foreach_copy_
from phalanx.comm.heap import keep_freed_memory

ALIGN = 64  # bytes of a cache line, so that two groups never share one
FLAGS = 5  # elements at the end of the last group that hold a weight and flags instead of gradients: flags.py

Allocate = Callable[[int, torch.dtype, torch.device], torch.Tensor]


class Arena:
    """The gradients of `params`, all of one dtype and device, cut into `groups` of consecutive ones.

    Every group begins on a cache line, and its length is a multiple of `multiple` elements, as the schedule requires. All padding
    happens here.
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
        self._aliases: dict[torch.nn.Parameter, torch.Tensor] = {}  # what `give` used last
        self._places = {p: (view.data_ptr(), view.stride()) for p, view in self.views.items()}
        self._graphs: dict[torch.nn.Parameter, torch.Tensor] = {}  # gradients with a graph, as `give_all` left them

    def views_of(self, flat: torch.Tensor) -> dict[torch.nn.Parameter, torch.Tensor]:
        """For every parameter, a view of its shape and layout in `flat`, which is laid out like this arena."""
        return {p: _view(flat, start, p) for p, start in self.starts.items()}

    def fits(self, p: torch.nn.Parameter) -> bool:
        """Whether dtype, device and shape of `p` still match its place. `model.double()`, for example, changes them."""
        return p.dtype is self.flat.dtype and p.device == self.flat.device and p.shape == self.views[p].shape

    def has(self, p: torch.nn.Parameter, grad: torch.Tensor) -> bool:
        """Whether `grad` is the memory that the arena reserves for the gradient of `p`."""
        return (
            grad.layout is torch.strided
            and (grad.data_ptr(), grad.stride()) == self._places[p]
            and grad.dtype is self.flat.dtype
            and grad.shape == p.shape
        )

    def take(self, p: torch.nn.Parameter) -> None:
        """Copy the gradient of `p` to its place, or zeros if it has none, and make `p.grad` an alias of that place.

        A gradient with a graph, after `backward(create_graph=True)`, is copied but stays `p.grad`.
        """
        grad = p.grad
        if grad is None:
            self.views[p].zero_()
        elif self.has(p, grad):
            return
        else:
            dense = grad.detach() if grad.layout is torch.strided else grad.detach().to_dense()
            inside = 0 <= dense.data_ptr() - self.flat.data_ptr() < self.flat.nbytes
            self.views[p].copy_(dense.clone() if inside else dense)  # inside: for example a transposed view of its own place
        if (grad is None or not grad.requires_grad) and self.fits(p):
            self.give(p)

    def take_all(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Copy the gradients of all `params`. A parameter that was frozen since then counts as zeros and keeps its gradient."""
        plain = {p: p.grad for p in params if p.requires_grad and p.grad is not None and self._is_plain(p, p.grad)}
        if plain:  # in one call: for small gradients a call takes longer than the copy
            foreach_copy_([self.views[p] for p in plain], list(plain.values()))
        for p in params:
            if p in plain:
                self.give(p)
            elif p.requires_grad:
                self.take(p)
            else:
                self.views[p].zero_()

    def _is_plain(self, p: torch.nn.Parameter, grad: torch.Tensor) -> bool:
        """Whether `grad` has memory of its own, as autograd allocates it."""
        if grad.layout is not torch.strided or grad.requires_grad or not self.fits(p):
            return False
        return not 0 <= grad.data_ptr() - self.flat.data_ptr() < self.flat.nbytes

    def give(self, p: torch.nn.Parameter) -> None:
        """Make `p.grad` an alias of its place."""
        if p.grad is None or not self.has(p, p.grad):
            alias = self._aliases.get(p)
            if alias is None or not self.has(p, alias):  # there is none yet, or the user has pointed it elsewhere
                view = self.views[p]
                # Not a view: the version counter of a view would also count our own writes.
                alias = torch.empty(0, dtype=view.dtype, device=view.device)
                alias.set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())
                self._aliases[p] = alias
            p.grad = alias

    def give_all(self) -> None:
        """Make all means the gradients of their parameters.

        A gradient with a graph keeps the graph. Its value becomes the mean, and its derivative stays this rank's own.
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
        """Before an update: replace a gradient with a graph, which is the mean up to rounding, by the exact mean."""
        for p, grad in self._graphs.items():
            if p.grad is grad:
                self.give(p)
        self._graphs.clear()


def _view(flat: torch.Tensor, start: int, p: torch.nn.Parameter) -> torch.Tensor:
    """The place of the gradient of `p`, in the memory layout of `p` if that is dense (channels_last stays channels_last)."""
    dense = p.is_contiguous() or torch.empty_like(p, device="meta").stride() == p.stride()
    if dense and not p.is_contiguous():
        return flat.as_strided(p.shape, p.stride(), flat.storage_offset() + start)
    return flat[start : start + p.numel()].view(p.shape)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
