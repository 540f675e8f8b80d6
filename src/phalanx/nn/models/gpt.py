"""A small GPT: a transformer that predicts the next token of a text.

Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), in the form of Karpathy's nanoGPT: learned
positions, layer norms before attention and before the perceptron, GELU, no biases in linear layers and norms. Differences:
the head has its own weights instead of the embedding's.

With 4 layers of 128 it has 820,352 parameters in 28 tensors for 96 characters and a context of 64.
"""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional as F

DEVIATION = 0.02  # of the initial weights, as in GPT-2


class DrawnLinear(nn.Linear):
    """A linear layer without bias whose weights start from a normal distribution."""

    def __init__(self, inputs: int, outputs: int, deviation: float = DEVIATION) -> None:
        self.deviation = deviation
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.deviation)


class DrawnEmbedding(nn.Embedding):
    """An embedding whose weights start from the same normal distribution."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=DEVIATION)


class Attention(nn.Module):
    """Multi-head causal self-attention: a position sees itself and earlier ones."""

    def __init__(self, width: int, heads: int, dropout: float, deviation: float) -> None:
        super().__init__()
        self.heads = heads
        self.queries_keys_values = DrawnLinear(width, 3 * width)
        self.out = DrawnLinear(width, width, deviation)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        rows, places, width = x.shape
        q, k, v = self.queries_keys_values(x).view(rows, places, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        kept = self.dropout.p if self.training else 0.0
        seen = F.scaled_dot_product_attention(q, k, v, dropout_p=kept, is_causal=True)
        return self.dropout(self.out(seen.transpose(1, 2).reshape(rows, places, width)))


class Block(nn.Module):
    """Attention and a perceptron, each with a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float, deviation: float) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(width, bias=False)
        self.attention = Attention(width, heads, dropout, deviation)
        self.before_perceptron = nn.LayerNorm(width, bias=False)
        self.perceptron = nn.Sequential(
            DrawnLinear(width, 4 * width), nn.GELU(), DrawnLinear(4 * width, width, deviation), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        return x + self.perceptron(self.before_perceptron(x))


class Gpt(nn.Module):
    """Maps tokens (batch, up to `context`) to logits of the next token (batch, positions, vocabulary)."""

    def __init__(self, vocabulary: int, *, context: int, depth: int, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.context = context
        deviation = DEVIATION / math.sqrt(2 * depth)  # every layer adds twice to the residual path
        self.tokens = DrawnEmbedding(vocabulary, width)
        self.places = DrawnEmbedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout, deviation) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = DrawnLinear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 2 or x.is_floating_point() or not 1 <= x.shape[1] <= self.context:
            raise ValueError(f"tokens are whole numbers (batch, 1 to {self.context} places); got {x.dtype} {tuple(x.shape)}")
        seen = self.dropout(self.tokens(x) + self.places.weight[: x.shape[1]])
        return self.head(self.norm(self.blocks(seen)))


def gpt(
    vocabulary: int = 96, *, context: int = 64, depth: int = 4, width: int = 128, heads: int = 4, dropout: float = 0.0
) -> Gpt:
    """A small GPT for text: it returns the logits of the next token at each position.

    Args:
        vocabulary: The number of distinct tokens.
        context: The maximum number of tokens it sees at once.
        depth: The number of layers.
        width: The size of a token's vector.
        heads: The number of attention heads. It must divide `width`.
        dropout: The fraction of activations that training sets to zero.

    Returns:
        The network.

    Raises:
        ValueError: If `heads` does not divide `width`, or a number is invalid.

    Example:
        >>> phalanx.models.gpt()(torch.zeros(2, 64, dtype=torch.long)).shape
        torch.Size([2, 64, 96])
    """
    for name, value in (("vocabulary", vocabulary), ("context", context), ("depth", depth), ("width", width), ("heads", heads)):
        if value < 1:
            raise ValueError(f"{name}={value}: at least 1")
    if width % heads:
        raise ValueError(f"width={width} does not divide into heads={heads}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout={dropout}: from 0 to less than 1")
    return Gpt(vocabulary, context=context, depth=depth, width=width, heads=heads, dropout=dropout)
