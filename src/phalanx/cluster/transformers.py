"""Transformers as shapes: GPT-2, Llama, or your own numbers of layers and widths, with the operations of a training step."""

from __future__ import annotations

from dataclasses import dataclass

from .workload import Model, Tensor

KERNELS = 30  # of a layer per step: matrix products forward and twice back, norms, attention, additions


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder. `hidden` is the inner width of the feed-forward part; `gated` means three matrices there, as in Llama.

    A sample is a sequence of `tokens`. `tied` means that input and output share their embedding.
    """

    layers: int
    width: int
    hidden: int
    vocabulary: int
    tokens: int
    positions: int = 0  # learned ones
    biases: bool = False
    gated: bool = False
    tied: bool = True
    key_value: int = 0  # width of keys and values together with their heads; 0: as wide as the queries

    def __post_init__(self) -> None:
        for name in ("layers", "width", "hidden", "vocabulary", "tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"a transformer with {name}={getattr(self, name)}; give at least 1")


def transformer(name: str, shape: Shape, samples: int) -> Model:
    """The parameters of a decoder in forward order, each with its share of the work.

    The work of a matrix is its elements times the tokens. Attention itself adds tokens x width twice, counted with its output.
    """
    wide = shape.key_value or shape.width
    norm = 2 if shape.biases else 1  # scale, shift
    tensors: list[tuple[str, int, float]] = [("embedding", shape.vocabulary * shape.width, 0.0)]
    high = {"embedding": shape.vocabulary, "positions": shape.positions, "head": shape.vocabulary}  # rows of matrices
    if shape.positions:
        tensors.append(("positions", shape.positions * shape.width, 0.0))

    def matrix(label: str, rows: int, cols: int, more: float = 0.0) -> None:
        tensors.append((f"{label}.weight", rows * cols, rows * cols + more))
        high[f"{label}.weight"] = cols
        if shape.biases:
            tensors.append((f"{label}.bias", cols, 0.0))

    for layer in range(shape.layers):
        place = f"layer{layer}"
        tensors.append((f"{place}.norm1", norm * shape.width, 0.0))
        matrix(f"{place}.attention.in", shape.width, shape.width + 2 * wide)
        matrix(f"{place}.attention.out", shape.width, shape.width, more=2.0 * shape.tokens * shape.width)
        tensors.append((f"{place}.norm2", norm * shape.width, 0.0))
        if shape.gated:
            matrix(f"{place}.gate", shape.width, shape.hidden)
        matrix(f"{place}.up", shape.width, shape.hidden)
        matrix(f"{place}.down", shape.hidden, shape.width)
    tensors.append(("norm", norm * shape.width, 0.0))
    head = float(shape.vocabulary * shape.width)
    if not shape.tied:
        tensors.append(("head", shape.vocabulary * shape.width, head))
    else:  # its gradient is complete when backward has reached the input
        tensors[0] = ("embedding", shape.vocabulary * shape.width, head)
    total = sum(work for *_, work in tensors)
    kernels = KERNELS * shape.layers
    parts = tuple(
        Tensor(label, elements, work / total, kernels // len(tensors) + (place < kernels % len(tensors)), high.get(label, 1))
        for place, (label, elements, work) in enumerate(tensors)
    )
    # a multiplication and an addition, forward, and twice as much back
    return Model(name, parts, samples, flops=6.0 * total * shape.tokens, tokens=shape.tokens)


OPENWEBTEXT = 9_035_582_198  # tokens of OpenWebText in GPT-2's encoding (nanoGPT, data/openwebtext)
LLAMA_TOKENS = 1_000_000_000_000  # of Llama-7B and 13B: Touvron et al., arXiv 2302.13971


def _gpt2(layers: int, width: int) -> tuple[Shape, int]:
    shape = Shape(layers, width, 4 * width, 50257, 1024, positions=1024, biases=True)
    return shape, OPENWEBTEXT // 1024


def _llama(layers: int, width: int, hidden: int) -> tuple[Shape, int]:
    return Shape(layers, width, hidden, 32000, 2048, gated=True, tied=False), LLAMA_TOKENS // 2048


TRANSFORMERS = {
    name: transformer(name, *shape)
    for name, shape in {
        "gpt2": _gpt2(12, 768),
        "gpt2-medium": _gpt2(24, 1024),
        "gpt2-large": _gpt2(36, 1280),
        "gpt2-xl": _gpt2(48, 1600),
        "llama-7b": _llama(32, 4096, 11008),
        "llama-13b": _llama(40, 5120, 13824),
    }.items()
}
