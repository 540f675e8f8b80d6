"""Cross entropy with smoothed labels that works if a rank has no samples.

The label is (1 - smoothing) times itself plus smoothing spread evenly over all classes, the right one included (Szegedy et al.,
arXiv 1512.00567; torch, MLPerf). Fujitsu's MXNet spreads it over the other classes only, which for K classes is the same as
smoothing * K / (K - 1) here.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F


class LabelSmoothingLoss(torch.nn.Module):
    """Cross entropy with smoothed labels: torch's `CrossEntropyLoss(label_smoothing=...)`, made safe for distributed training.

    Three things differ. A batch whose labels are all ignored has loss 0 and zero gradients instead of NaN, which would spoil
    the mean gradient of all ranks. Sixteen-bit logits are computed in float32, because a sum over many samples overflows
    float16. Soft targets may have any floating dtype.

    Args:
        smoothing: The fraction of each label that is spread evenly over all classes.
        weight: One weight per class.
        ignore_index: Samples with this label are ignored.
        reduction: `"mean"`, `"sum"` or `"none"`. As in torch, the mean is weighted by the weight of the classes.

    Raises:
        ValueError: If `smoothing` or `reduction` is invalid.

    Example:
        >>> loss = phalanx.LabelSmoothingLoss(smoothing=0.1)
        >>> round(loss(torch.tensor([[2.0, 0.0]]), torch.tensor([0])).item(), 3)
        0.227
    """

    weight: torch.Tensor | None

    def __init__(
        self, smoothing: float = 0.1, *, weight: torch.Tensor | None = None, ignore_index: int = -100, reduction: str = "mean"
    ) -> None:
        super().__init__()
        if not 0 <= smoothing <= 1:
            raise ValueError(f"smoothing={smoothing}: must be from 0 to 1; 0.1 is usual")
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction={reduction!r}: must be mean, sum or none")
        self.smoothing, self.ignore_index, self.reduction = smoothing, ignore_index, reduction
        self.register_buffer("weight", weight)

    def forward(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The loss of `logits` for `target`: class numbers, or probabilities in the shape of the logits."""
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        weight = None if self.weight is None else self.weight.to(logits.dtype)
        soft = target.is_floating_point()
        if soft:
            target = target.to(logits.dtype)
        divide = self.reduction == "mean" and not soft
        nothing = soft and not len(target)  # torch's mean would be NaN
        loss = F.cross_entropy(
            logits,
            target,
            weight=weight,
            ignore_index=self.ignore_index,
            reduction="sum" if divide or (nothing and self.reduction == "mean") else self.reduction,
            label_smoothing=self.smoothing,
        )
        return loss / self._weight_of(target, weight, logits.dtype) if divide else loss

    def _weight_of(self, target: torch.Tensor, weight: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """The divisor of torch's mean, or 1 if it is 0, in which case the sum is 0, too."""
        counted = target != self.ignore_index
        if weight is None:
            total = counted.sum().to(dtype)
        else:
            total = (weight[target.masked_fill(~counted, 0)] * counted).sum()
        return total.masked_fill(total == 0, 1)

    def extra_repr(self) -> str:
        return f"smoothing={self.smoothing:g}, ignore_index={self.ignore_index}, reduction={self.reduction!r}"
