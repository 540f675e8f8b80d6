"""Batch norm for large batches, where each rank sees only a small part of the batch.

    average_batchnorm_(model, comm)        own statistics on each rank in training; running ones averaged before evaluation
    use_last_batch_(model)                 no moving average: the statistics of the last batch; average those, too
    convert_batchnorm(model, comm)         the statistics of the whole batch: N ranks compute what one process would

The first is Fujitsu's (per-process statistics with a tuned momentum) with ChainerMN's AllreducePersistent, the second that of
Akiba et al. (arXiv 1711.04325), the third ChainerMN's MultiNodeBatchNormalization; Ying et al. (arXiv 1811.06992) run it over
groups of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from phalanx._torch_private import BatchNorm as _BatchNorm
from phalanx.comm.communicator import Communicator

CONVERTIBLE = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


# ---- statistics of each rank, averaged now and then --------------------------------------------------------------------------


def average_batchnorm_(model: nn.Module, comm: Communicator) -> None:
    """Replace the running statistics of all batch norms by their mean over the ranks, in one message. All ranks call it.

    You get the mean of the means and the mean of the variances, as in ChainerMN. `num_batches_tracked` becomes the rounded mean.

    Args:
        model: The model. Its buffers change in place.
        comm: The communicator.

    Example:
        >>> model = torch.nn.BatchNorm1d(3)
        >>> phalanx.average_batchnorm_(model, comm)
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    buffers = [x for m in norms for x in (m.running_mean, m.running_var, m.num_batches_tracked) if x is not None]
    if not buffers:
        return
    # float64 holds every statistic and every count exactly
    flat = torch.cat([x.detach().reshape(-1).to(device=buffers[0].device, dtype=torch.float64) for x in buffers])
    comm.all_reduce(flat, op="mean")
    for x, mean in zip(buffers, flat.split([x.numel() for x in buffers])):
        x.copy_(mean.view(x.shape) if x.is_floating_point() else mean.round().view(x.shape))


def use_last_batch_(model: nn.Module) -> None:
    """Keep the statistics of the last batch instead of a moving average. `average_batchnorm_` then averages them over ranks.

    Moving averages lag behind weights that move fast, as they do with very large batches.
    """
    for m in model.modules():
        if isinstance(m, _BatchNorm):
            m.momentum = 1.0


# ---- statistics of the whole batch -------------------------------------------------------------------------------------------


class MultiNodeBatchNorm(_BatchNorm):
    """Batch norm over the batches of all ranks, for inputs of any shape (N, C, ...).

    Forward and backward compute what one process would compute on the concatenated batch, even if batches differ in size or are
    empty. Each direction is one all-reduce of 2 C numbers. All ranks must run the same layers in the same order. In evaluation
    it is torch's batch norm and sends nothing. State dicts have torch's format.

    The gradients of weight and bias are this rank's part, as with every other layer; the multi-node optimizer averages them.

    Args:
        num_features: The number of channels, C.
        comm: The communicator whose ranks share their statistics.
        eps: As in torch.
        momentum: As in torch.
        affine: As in torch.
        track_running_stats: As in torch.
        device: As in torch.
        dtype: As in torch.

    Raises:
        ValueError: When called on an input of another shape, or in training on a single value per channel.

    Example:
        >>> norm = phalanx.MultiNodeBatchNorm(3, comm)
        >>> norm(torch.randn(8, 3, 4, 4)).shape
        torch.Size([8, 3, 4, 4])
    """

    def __init__(
        self,
        num_features: int,
        comm: Communicator,
        *,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self._shared = _Shared(comm)

    @property
    def comm(self) -> Communicator:
        """The communicator whose ranks share their statistics."""
        return self._shared.comm

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002  torch's name
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(f"expected (N, {self.num_features}, ...), got {tuple(input.shape)}")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise `x` with the statistics of all ranks."""
        self._check_input_dim(x)
        if not self.training or self.comm.size == 1:
            return super().forward(x)
        y, mean, variance, total, empty = _Normalize.apply(x, self.weight, self.bias, self.eps, self.comm)
        if self.running_mean is not None and not empty:
            self._track(mean, variance, total)
        return y

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, total: torch.Tensor) -> None:
        assert self.running_mean is not None  # either both exist or neither
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        unbiased = variance * (total / (total - 1))
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            share: Any = self.momentum
            if share is None:
                share = self.num_batches_tracked.double().reciprocal_().to(running.dtype)
            running.lerp_(new.to(running.dtype), share)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, ranks={self.comm.size}"


def convert_batchnorm(model: nn.Module, comm: Communicator, *, group: int | None = None) -> nn.Module:
    """Replace every BatchNorm1d, 2d, 3d and SyncBatchNorm of a model by `MultiNodeBatchNorm`. All ranks call it.

    Parameters and buffers stay the same tensors, so you can convert after creating the optimizer.

    Args:
        model: The model. It changes in place.
        comm: The communicator.
        group: Share statistics among this many consecutive ranks instead of among all.

    Returns:
        `model`, or its replacement if `model` itself is a batch norm.

    Raises:
        ValueError: If `group` is not a number of ranks of `comm`.
        TypeError: If the model has a batch norm of another type.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        >>> type(phalanx.convert_batchnorm(model, comm)[1]).__name__
        'MultiNodeBatchNorm'
    """
    if group is not None:
        if not 1 <= group <= comm.size:
            raise ValueError(f"group={group}: must be a number of ranks, 1 to {comm.size}")
        comm = comm.split(comm.rank // group, comm.rank)
    made: dict[nn.Module, nn.Module] = {}  # a shared module stays shared
    for name, module in model.named_modules(remove_duplicate=False):
        if type(module) in CONVERTIBLE:
            made.setdefault(module, _converted(module, comm))
        elif isinstance(module, _BatchNorm) and not isinstance(module, MultiNodeBatchNorm):
            raise TypeError(
                f"{name or 'the model'} is a {type(module).__name__}, which cannot be converted: only its author knows "
                "what to synchronise"
            )
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in made:
                parent._modules[name] = made[child]
    return made.get(model, model)


def _converted(old: _BatchNorm, comm: Communicator) -> MultiNodeBatchNorm:
    new = MultiNodeBatchNorm(
        old.num_features,
        comm,
        eps=old.eps,
        momentum=old.momentum,
        affine=old.affine,
        track_running_stats=old.track_running_stats,
        device="meta",  # its own tensors are replaced
    )
    new._parameters, new._buffers = old._parameters, old._buffers
    return new.train(old.training)


class _Shared:
    """A communicator in a module. Copies of the model share it; it cannot be pickled."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def __deepcopy__(self, memo: dict[int, Any]) -> _Shared:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a MultiNodeBatchNorm holds connections, which cannot be pickled: save model.state_dict()")


class _Normalize(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) * weight + bias, with mean and variance over all ranks.

    On a GPU the host reads nothing: the number of values over all ranks stays there. Only a rank with fewer than 2 values of its
    own checks whether that is too few; the others know that it is not.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, eps: float, comm: Communicator) -> Any:
        count, channels, wide = x.numel() // x.shape[1], x.shape[1], _wide(x.dtype)
        # Sums of squares in float64: float32 loses what is small compared with the mean
        sums = torch.zeros(2 * channels + 1, dtype=torch.float64, device=x.device)
        if count:
            variance, mean = torch.var_mean(x.to(wide), _without_channels(x), correction=0)
            variance, mean = variance.double(), mean.double()
            sums[:channels] = count * mean
            sums[channels:-1] = count * (variance + mean * mean)
            sums[-1:].fill_(count)  # sums[-1] = count would be a blocking copy
        comm.all_reduce(sums)
        found = int(sums[-1]) if count < 2 else count
        if found == 1:
            raise ValueError(f"batch norm in training needs more than 1 value per channel over all ranks, got {tuple(x.shape)}")
        total = sums[-1].clamp(min=1)
        mean = sums[:channels] / total
        variance = (sums[channels:-1] / total - mean * mean).clamp_(min=0)
        mean, variance = mean.to(wide), variance.to(wide)
        scale = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.comm, ctx.total, ctx.with_bias = comm, total, bias is not None
        ctx.mark_non_differentiable(mean, variance, total)
        weight, bias = (p if p is None else p.to(wide) for p in (weight, bias))
        y = F.batch_norm(x, mean, variance, weight, bias, training=False, eps=eps) if count else torch.empty_like(x)
        return y, mean, variance, total, found == 0

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Any, *_: Any) -> Any:
        x, weight, mean, scale = ctx.saved_tensors
        channels, dims, wide = x.shape[1], _without_channels(x), _wide(x.dtype)
        shape = (1, channels) + (1,) * (x.dim() - 2)
        dy = dy.to(wide)
        normal = (x.to(wide) - mean.view(shape)) * scale.view(shape)
        own = torch.stack([dy.sum(dims), (dy * normal).sum(dims)])
        dx = None
        if ctx.needs_input_grad[0]:
            sums = own.to(torch.float64, copy=True)  # `own` stays local
            ctx.comm.all_reduce(sums)
            shift, slope = (sums / ctx.total).to(wide)
            by = scale if weight is None else scale * weight.to(wide)
            dx = (by.view(shape) * (dy - shift.view(shape) - normal * slope.view(shape))).to(x.dtype)
        dweight = own[1].to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None
        dbias = own[0].to(weight.dtype) if ctx.with_bias and ctx.needs_input_grad[2] else None
        return dx, dweight, dbias, None, None


def _without_channels(x: torch.Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
