"""Flat memory for gradients: every parameter's gradient is a view of one buffer per dtype and device, in the order of travel.

Autograd makes a fresh gradient after `zero_grad()` (torch's default sets it to None), so presetting the views would not hold.
Instead the fresh gradient is copied into its view when it is complete, and `p.grad` becomes the view: as fast as accumulating in
place, with nothing to zero, and it survives whatever a user does to `p.grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from phalanx.grad.heap import keep_freed_memory

ALIGN = 64  # bytes: a cache line, so that two groups never share one

Allocate = Callable[[int, torch.dtype, torch.device], torch.Tensor]


class Arena:
    """The gradients of `params`, all of one dtype and device, cut into `groups` of consecutive ones.

    Every group begins on a cache line and its length is a multiple of `multiple` elements, which is what the schedule wants:
    padding happens here, once, and nowhere else. The last group ends with at least one element that is no gradient.
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
            spare = 1 if group is groups[-1] else 0
            at = begin + _round_up(at - begin + spare, multiple)
            spans.append((begin, at))
            at = _round_up(at, unit)
        self.flat = allocate(at, first.dtype, first.device)
        self.flat.zero_()  # the padding stays zero
        self.groups = [self.flat[begin:end] for begin, end in spans]
        self.starts = dict(zip(params, starts))
        self.views = self.views_of(self.flat)

    def views_of(self, flat: torch.Tensor) -> dict[torch.nn.Parameter, torch.Tensor]:
        """A tensor of the shape and layout of every parameter, in a buffer laid out as this one."""
        return {p: _view(flat, start, p) for p, start in self.starts.items()}

    def take(self, p: torch.nn.Parameter) -> None:
        """Bring the gradient of `p` into its view, zeros if there is none, and make the view its gradient."""
        view, grad = self.views[p], p.grad
        if grad is view:
            return
        if grad is None:
            view.zero_()
        elif grad.layout is not torch.strided:  # an embedding's; it has no address
            view.copy_(grad.detach().to_dense())
        elif grad.data_ptr() != view.data_ptr() or grad.stride() != view.stride():
            view.copy_(grad.detach())
        if grad is None or not grad.requires_grad:  # after backward(create_graph=True) p.grad has a graph, which is the user's
            p.grad = view

    def take_all(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Bring in all of these, graphs or not; one that was frozen meanwhile counts as zeros and keeps what it has."""
        for p in params:
            if p.requires_grad:
                self.take(p)
                p.grad = self.views[p]
            else:
                self.views[p].zero_()

    def lost(self, p: torch.nn.Parameter) -> bool:
        """Whether, after `take`, the user dropped or replaced the gradient of `p`."""
        grad = p.grad
        return p.requires_grad and grad is not self.views[p] and (grad is None or not grad.requires_grad)


def _view(flat: torch.Tensor, start: int, p: torch.nn.Parameter) -> torch.Tensor:
    """The place of p's gradient, in p's own memory layout where that is dense (channels_last stays channels_last)."""
    dense = p.is_contiguous() or torch.empty_like(p, device="meta").stride() == p.stride()
    if dense and not p.is_contiguous():
        return flat.as_strided(p.shape, p.stride(), flat.storage_offset() + start)
    return flat[start : start + p.numel()].view(p.shape)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
