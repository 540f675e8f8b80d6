"""Networks of benchmarks, with a batch of random data each: what people train on few processors, and ResNet-50.

name        parameters   what
resnet50    25.6 M       images of 64 x 64 pixels
gpt         0.8 M        a character GPT: 4 layers, 4 heads, width 128, context 64
nanogpt     3.2 M        the same, with width 256
bert        4.4 M        the size of BERT-tiny: 2 layers, width 128, 30,522 words, context 128
mlp         0.1 M        784-128-10, the digits of MNIST
cnn         1.2 M        PyTorch's MNIST example: two convolutions, two linear layers
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

import phalanx


class Block(nn.Module):
    """One layer of a transformer, normalised before each half."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.rise, self.fall = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.attend(self.before(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.project(heads.transpose(1, 2).reshape(batch, length, width))
        return x + self.fall(F.gelu(self.rise(self.between(x))))


class Transformer(nn.Module):
    """Token and position embeddings, `layers` blocks, and a score for every word at every place."""

    def __init__(self, words: int, context: int, layers: int, heads: int, width: int, *, causal: bool) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=causal) for _ in range(layers)))
        self.last = nn.LayerNorm(width)
        self.score = nn.Linear(width, words, bias=False)
        self.score.weight = self.words.weight  # tied, as GPT-2 and BERT have it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x) + self.places.weight[: x.shape[1]]
        return self.score(self.last(self.blocks(x))).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class Workload:
    """A network, what makes inputs and targets for a batch, and the optimizer that people use with it."""

    model: Callable[[], nn.Module]
    data: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    optimizer: str = "adamw"
    steps: int = 5  # per turn: one step is too short to time


def _images(channels: int, pixels: int, classes: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    return lambda batch: (torch.randn(batch, channels, pixels, pixels), torch.randint(classes, (batch,)))


def _text(words: int, context: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    return lambda batch: (torch.randint(words, (batch, context)), torch.randint(words, (batch * context,)))


def _cnn() -> nn.Module:
    features = [nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*features, nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10))


WORKLOADS = {
    "resnet50": Workload(phalanx.models.resnet50, _images(3, 64, 1000), "sgd", steps=1),
    "gpt": Workload(lambda: Transformer(96, 64, 4, 4, 128, causal=True), _text(96, 64)),
    "nanogpt": Workload(lambda: Transformer(96, 64, 4, 4, 256, causal=True), _text(96, 64)),
    "bert": Workload(lambda: Transformer(30522, 128, 2, 2, 128, causal=False), _text(30522, 128)),
    "mlp": Workload(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)), _images(1, 28, 10), "sgd"
    ),
    "cnn": Workload(_cnn, _images(1, 28, 10), "sgd"),
}
