"""Phalanx's own tasks: classification, language modelling and regression."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from phalanx.nn.loss import LabelSmoothingLoss
from phalanx.train.networks import SampleFacts
from phalanx.train.task import Metric, Task, Totals

AUXILIARY = 0.3  # weight of GoogLeNet's auxiliary heads (Szegedy et al., arXiv 1409.4842)
IGNORED = -100  # a label that is ignored, as in torch


# ---- classification ------------------------------------------------------------------------------------------------------------


def classification(smoothing: float) -> Task:
    """One of several classes per sample."""
    return Task(
        name="classification",
        loss=of_all_heads(LabelSmoothingLoss(smoothing)),
        measure=measure_classes,
        metrics=(
            Metric("top1", "top-1", percent=True),
            Metric("top5", "top-5", percent=True),
            Metric("loss", "loss", lower_is_better=True),
        ),
        correct=lambda outputs, y: (logits_of(outputs).detach().argmax(1) == y).sum(),
        unit="images",
        classes=True,
        check=check_classes,
    )


def logits_of(outputs: Any) -> Tensor:
    """The logits of a network; those of its last head if it has auxiliary ones."""
    found: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
    return found


def of_all_heads(loss: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
    """Add the losses of auxiliary heads, if there are any."""

    def over_heads(outputs: Any, y: Any) -> Tensor:
        last = loss(logits_of(outputs), y)
        return last + sum(AUXILIARY * loss(head, y) for head in outputs[1:]) if isinstance(outputs, tuple) else last

    return over_heads


def measure_classes(outputs: Any, y: Tensor) -> Totals:
    """Count top-1 and top-5 hits, and sum the cross entropy without smoothing."""
    logits = logits_of(outputs)
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices == y[:, None]
    losses = F.cross_entropy(logits.float(), y, reduction="sum")
    return {"top1": (best[:, 0].sum(), len(y)), "top5": (best.sum(), len(y)), "loss": (losses, len(y))}


def check_classes(outputs: Any, facts: SampleFacts) -> None:
    """Check that there is one logit per class."""
    logits = logits_of(outputs)
    if not isinstance(logits, Tensor) or logits.shape != (1, facts.classes):
        raise ValueError(f"it gives {_shape(logits)} for one sample, wanted 1 x {facts.classes}, a logit for each class")


# ---- language modelling --------------------------------------------------------------------------------------------------------


def language(smoothing: float) -> Task:
    """Predict the next character of a text, at each position of a sample."""
    loss = LabelSmoothingLoss(smoothing, ignore_index=IGNORED)
    return Task(
        name="language",
        loss=lambda outputs, y: loss(outputs.flatten(0, 1), y.flatten()),
        measure=measure_text,
        metrics=(
            Metric("loss", "loss", lower_is_better=True),
            Metric("perplexity", "perplexity", lower_is_better=True, of_loss=True),
            Metric("bits_per_character", "bits per character", lower_is_better=True, of_loss=True),
        ),
        derive=add_perplexity,
        unit="characters",
        units=lambda y: int(y.shape[1]),
        classes=True,
        check=check_text,
    )


def measure_text(outputs: Tensor, y: Tensor) -> Totals:
    """Cross entropy over all characters that are not ignored; their number may differ between samples."""
    total = F.cross_entropy(outputs.float().flatten(0, 1), y.flatten(), ignore_index=IGNORED, reduction="sum")
    return {"loss": (total, (y != IGNORED).sum())}


def add_perplexity(means: dict[str, float]) -> dict[str, float]:
    """Perplexity of the mean loss over the whole text, which is not the mean of the batches' perplexities."""
    loss = means["loss"]
    perplexity = math.exp(loss) if loss < 700 else loss * math.inf  # NaN stays NaN
    return means | {"perplexity": perplexity, "bits_per_character": loss / math.log(2)}


def check_text(outputs: Any, facts: SampleFacts) -> None:
    """Check that there is one logit per character of the vocabulary at each position."""
    places, vocabulary = facts.text()
    if not isinstance(outputs, Tensor) or outputs.shape != (1, places, vocabulary):
        raise ValueError(f"it gives {_shape(outputs)} for one sample, wanted 1 x {places} x {vocabulary}")


# ---- regression ----------------------------------------------------------------------------------------------------------------


def regression(smoothing: float) -> Task:
    """Predict numbers in the shape of the network's outputs, with mean squared error unless you set your own loss."""
    if smoothing:
        raise ValueError("label_smoothing is for tasks with classes")
    return Task(
        name="regression",
        loss=F.mse_loss,
        measure=lambda outputs, y: {"loss": (F.mse_loss(outputs.float(), y.float()) * len(y), len(y))},
        metrics=(Metric("loss", "loss", lower_is_better=True),),
    )


TASKS: dict[str, Callable[[float], Task]] = {"classification": classification, "language": language, "regression": regression}


def _shape(outputs: Any) -> str:
    if isinstance(outputs, torch.Tensor):
        return " x ".join(map(str, outputs.shape)) or "one number"
    return f"a {type(outputs).__name__}"
