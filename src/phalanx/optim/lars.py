"""LARS: SGD with momentum in which every layer moves in proportion to its own size (You, Gitman, Ginsburg, arXiv 1708.03888).

For a parameter w with gradient g that `skip` does not select:

    d = g + weight_decay * w
    ratio = trust_coefficient * |w| / (|g| + weight_decay * |w| + eps), or 1 if |w| or |g| is zero
    u = lr * ratio * d;   v = momentum * v + u;   w -= v, or with nesterov w -= momentum * v + u

For a skipped parameter d = g and ratio = 1. docs/large-batch.md explains how other variants called LARS differ. `MLPERF` holds
the options of MLPerf's reference, the same rule with another eps.

Norms: on a GPU torch's multi-tensor operations compute those of all layers together (Fujitsu's batched norm), and nothing waits
for the device. On a CPU, passes over whole lists only lose the cache, so the native core computes a layer's norms right before
its update, both in one pass. Without the core, the update is one pass of torch's fused SGD: with dampening 1 - c that is v =
momentum * v + c * d, w -= v.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, overload

import torch
from torch.optim.optimizer import ParamsT

from phalanx._torch_private import foreach_add, foreach_add_, foreach_mul, foreach_mul_, foreach_norm, foreach_sub_, fused_sgd_
from phalanx.native import core
from phalanx.native.updates import SgdRow, lars_step

MLPERF: Mapping[str, float] = MappingProxyType({"momentum": 0.9, "trust_coefficient": 0.001, "eps": 1e-7})

Skip = Callable[[torch.Tensor], bool]

PLAIN = (torch.nn.Parameter, torch.Tensor)  # a subclass may have no memory of its own


def is_vector(p: torch.Tensor) -> bool:
    """Whether `p` has fewer than 2 dims: a bias, or the scale or shift of a normalisation."""
    return p.ndim < 2


class Layer(NamedTuple):
    """A parameter, its gradient and its velocity (None without momentum). `adapted` unless it is skipped."""

    w: torch.Tensor
    g: torch.Tensor
    v: torch.Tensor | None
    adapted: bool


class Lars(torch.optim.Optimizer):
    """SGD with momentum in which every layer moves in proportion to its own size (You, Gitman, Ginsburg, arXiv 1708.03888).

    All options may differ between parameter groups. The native core updates float32 parameters on the CPU, if it is
    available.

    Args:
        params: Parameters or groups, as for any torch optimizer.
        lr: The learning rate.
        momentum: The share of the velocity to keep.
        weight_decay: Added to the gradient as weight_decay * w.
        trust_coefficient: The size of a step relative to the size of the layer.
        eps: Added to the denominator of the trust ratio.
        nesterov: Look ahead along the momentum.
        skip: Selects parameters that get neither trust ratio nor weight decay. By default those with fewer than 2 dimensions.
        lr_in_momentum: Multiply by the rate before the velocity. False does so after it, as timm, torch-optimizer and LARC do.
        foreach: Force or forbid torch's multi-tensor operations. By default they are used for parameters that are not on the CPU.

    Raises:
        ValueError: If an option is negative, or `nesterov` is set without momentum.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = phalanx.Lars(model.parameters(), lr=3.2, momentum=0.9, weight_decay=5e-5)
        >>> model(torch.ones(8, 4)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        eps: float = 1e-9,
        nesterov: bool = False,
        skip: Skip = is_vector,
        lr_in_momentum: bool = True,
        foreach: bool | None = None,
    ) -> None:
        options = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "nesterov": nesterov,
            "lr_in_momentum": lr_in_momentum,
            "foreach": foreach,
        }
        self._skip = skip
        super().__init__(params, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch. It may have its own `skip`."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for name in ("lr", "momentum", "weight_decay", "trust_coefficient", "eps"):
            if not float(group[name]) >= 0:
                raise ValueError(f"Lars: {name}={group[name]!r}: a number, 0 or more")
        if group["nesterov"] and not group["momentum"]:
            raise ValueError("Lars: nesterov looks ahead along the momentum, but momentum is 0")
        # numbers instead of a function: what to skip is decided here, and state_dict() holds it as plain data
        skip = group.pop("skip", self._skip)
        group["skipped"] = [i for i, p in enumerate(group["params"]) if skip(p)]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_skip": self._skip}

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the parameters once. Gradients are only read."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        native = core.is_native()
        for group in self.param_groups:
            together: dict[tuple[torch.device, torch.dtype], list[Layer]] = {}
            natively, skipped = [], []
            for layer in self._layers(group):
                if not layer.w.is_cpu if group["foreach"] is None else group["foreach"]:
                    together.setdefault((layer.w.device, layer.w.dtype), []).append(layer)
                elif native and _fits_native(layer):
                    natively.append(layer)
                elif layer.adapted:
                    _move(group, [layer], _ratio(group, _norm(layer.w), _norm(layer.g)))
                else:
                    skipped.append(layer)
            if natively:
                _move_natively(group, natively)
            if skipped:
                _move(group, skipped, 1.0)
            for layers in together.values():
                _move_together(group, layers)
        return loss

    def _layers(self, group: dict[str, Any]) -> list[Layer]:
        """Return the parameters that have a gradient."""
        skipped, momentum, found = set(group["skipped"]), group["momentum"], []
        for i, p in enumerate(group["params"]):
            g, v = p.grad, None
            if g is None:
                continue
            if g.layout is not torch.strided:
                raise TypeError(f"Lars: the norm of a {g.layout} gradient is not implemented: use Embedding(sparse=False)")
            if momentum:
                state = self.state[p]
                v = state.get("momentum_buffer")
                if v is None:
                    v = state["momentum_buffer"] = torch.zeros_like(p)
            found.append(Layer(p, g, v, i not in skipped))
        return found


def lars_row(group: dict[str, Any], *, adapted: bool, offset: int = 0, count: int = 0) -> SgdRow:
    """Return what the native core needs to know about a tensor of `group`."""
    return SgdRow(
        offset,
        count,
        lr=float(group["lr"]),
        momentum=group["momentum"],
        weight_decay=group["weight_decay"] if adapted else 0.0,
        nesterov=group["nesterov"],
        lr_in_momentum=group["lr_in_momentum"],
        adapted=adapted,
        trust=group["trust_coefficient"],
        eps=group["eps"],
    )


def _move_natively(group: dict[str, Any], layers: list[Layer]) -> None:
    """Compute norms and update of each layer in the native core."""
    rows = [lars_row(group, adapted=adapted) for adapted in (False, True)]
    tensors = [(w, v, g) for w, g, v, _ in layers if v is not None]
    lars_step(tensors, [rows[layer.adapted] for layer in layers])
    torch.autograd.graph.increment_version([layer.w for layer in layers])  # as after any operation in place


def _move(group: dict[str, Any], layers: list[Layer], ratio: float) -> None:
    """Update layers that have the same ratio, in one pass over each if torch has one."""
    lr, momentum, nesterov = float(group["lr"]), group["momentum"], group["nesterov"]
    decay = group["weight_decay"] if layers[0].adapted else 0.0
    step, rate = (ratio * lr, 1.0) if group["lr_in_momentum"] or not momentum else (ratio, lr)
    exact = not momentum or step > 1e-7  # 1 - (1 - step) has few digits of a tiny step
    fused = [layer for layer in layers if _fits_fused(layer)] if exact and not nesterov else []
    if fused:
        ws, gs, vs = ([x for x in xs if x is not None] for xs in list(zip(*fused))[:3])
        fused_sgd_(
            ws,
            gs,
            vs,
            weight_decay=decay,
            momentum=momentum,
            lr=rate if momentum else step,
            dampening=1.0 - step if momentum else 0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,  # the first velocity would be the gradient itself, not `step` times it
        )
        torch.autograd.graph.increment_version(ws)  # fused SGD leaves this to its caller
    for w, g, v, _ in layers if not fused else [layer for layer in layers if not _fits_fused(layer)]:
        u = g.add(w, alpha=decay).mul_(step)
        if v is not None:
            v.mul_(momentum).add_(u)
            u = u.add_(v, alpha=momentum) if nesterov else v
        w.sub_(u, alpha=rate)


def _move_together(group: dict[str, Any], layers: list[Layer]) -> None:
    """Update all layers of one device and dtype in a few multi-tensor operations that never wait for the device."""
    adapted = [layer for layer in layers if layer.adapted]
    us = [layer.g for layer in adapted]
    if adapted:
        ws, wide = [layer.w for layer in adapted], torch.promote_types(layers[0].w.dtype, torch.float32)
        w_norm, g_norm = (torch.stack(foreach_norm(xs, dtype=wide)) for xs in (ws, us))
        ratio = group["trust_coefficient"] * w_norm / (g_norm + group["weight_decay"] * w_norm + group["eps"])
        ratio.masked_fill_((w_norm == 0) | (g_norm == 0), 1.0)
        us = list(foreach_add(us, ws, alpha=group["weight_decay"]))
        foreach_mul_(us, list(ratio.to(us[0].dtype).unbind()))
    plain = [layer.g for layer in layers if not layer.adapted]
    us += foreach_mul(plain, 1.0) if plain else ()
    layers = adapted + [layer for layer in layers if not layer.adapted]
    ws, rate = [layer.w for layer in layers], group["lr"]
    if group["lr_in_momentum"] or not group["momentum"]:
        foreach_mul_(us, rate)
        rate = 1.0
    if group["momentum"]:
        vs = [layer.v for layer in layers if layer.v is not None]
        foreach_mul_(vs, group["momentum"])
        foreach_add_(vs, us)
        if group["nesterov"]:
            foreach_add_(us, vs, alpha=group["momentum"])
        else:
            us = vs
    if isinstance(rate, torch.Tensor):  # on the device, where a captured graph reads it; float(rate) would wait
        us, rate = list(foreach_mul(us, rate)), 1.0
    foreach_sub_(ws, us, alpha=rate)


def _ratio(group: dict[str, Any], w_norm: float, g_norm: float) -> float:
    if w_norm == 0 or g_norm == 0:
        return 1.0
    return float(group["trust_coefficient"] * w_norm / (g_norm + group["weight_decay"] * w_norm + group["eps"]))


def _norm(x: torch.Tensor) -> float:
    if x.dtype is torch.float32 and x.is_contiguous():
        x = x.detach().view(-1)
        square = torch.dot(x, x).item()  # the fastest in torch: its reductions take a tenth longer
        if 1e-30 < square < math.inf:  # below that, many squares underflow
            return math.sqrt(square)
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))


def _fits_native(layer: Layer) -> bool:
    """Whether the native core can run. It gets addresses, so all must be plain tensors, with a velocity."""
    w, g, v, _ = layer
    return type(v) is type(g) is torch.Tensor and type(w) in PLAIN and _fits_fused(layer)


def _fits_fused(layer: Layer) -> bool:
    """Whether torch's fused SGD can run. It walks through memory regardless of strides, in float32."""
    w, g, v, _ = layer
    strides = w.stride()
    return (
        _in_one_piece(w)
        and g.dtype is torch.float32
        and g.stride() == strides
        and (v is None or (v.dtype is torch.float32 and v.stride() == strides))
    )


def _in_one_piece(w: torch.Tensor) -> bool:
    """Whether `w` is float32 in memory without gaps."""
    return w.dtype is torch.float32 and (
        w.is_contiguous() or (w.ndim == 4 and w.is_contiguous(memory_format=torch.channels_last))
    )
