"""What is trained: the gradient tensors of a model in forward order, each with its share of the work, and how fast one device is.

The models are written down as shapes, so that a plan needs neither torch nor the model itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

IMAGENET = 1_281_167  # training images


@dataclass(frozen=True, slots=True)
class Tensor:
    """A parameter: its elements, the share of forward (and of backward) work of its layer, the kernels of its layer per step.

    `rows` are those of the parameter as a matrix; vectors, and parameters of unknown shape, have one.
    """

    name: str
    elements: int
    work: float
    kernels: int
    rows: int = 1


@dataclass(frozen=True, slots=True)
class Model:
    """A network as its parameters in forward order; `samples` is the size of an epoch, each of `tokens`."""

    name: str
    tensors: tuple[Tensor, ...]
    samples: int = IMAGENET
    flops: float = 0.0  # operations of a training step per sample; 0: unknown
    tokens: int = 1  # of a sample

    @property
    def elements(self) -> int:
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def kernels(self) -> int:
        """Launches of one step: forward, gradient by input and by weight."""
        return sum(tensor.kernels for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class Compute:
    """One device: a step of B samples takes `fixed` + B * `per_sample` seconds, a third of it forward, as is usual."""

    per_sample: float
    fixed: float = 0.0
    forward: float = 1 / 3
    optimizer: float = 0.0  # s per step, after the last gradient
    source: str = ""

    def seconds(self, batch: float) -> float:
        """Forward and backward of `batch` samples."""
        return self.fixed + batch * self.per_sample

    def faster(self, factor: float) -> Compute:
        """A device that needs 1/factor of the time for everything."""
        return replace(self, per_sample=self.per_sample / factor, fixed=self.fixed / factor, optimizer=self.optimizer / factor)


# A kernel that waits for the one before it takes about 10 us, however small its work: launch, first wave, last wave. This is an
# assumption in the range of what profilers show, not a fit. Two measurements of one device at different batches replace it.
KERNEL_FLOOR = 10e-6


CURVED = 0.05  # of a step: how much two measurements of a device without a constant part may disagree


def from_one(model: Model, batch: float, samples_per_s: float, *, overhead: float = 0.0, source: str = "") -> Compute:
    """A device with one known rate. What does not grow with the batch is the least time of its kernels plus `overhead`."""
    step = batch / samples_per_s
    fixed = min(model.kernels * KERNEL_FLOOR + overhead, step / 2)
    return Compute((step - fixed) / batch, fixed, source=source)


def from_two(first: tuple[float, float], second: tuple[float, float], *, source: str = "") -> Compute:
    """A device with two known pairs (batch, samples/s)."""
    (small, slow), (large, fast) = sorted((first, second))
    if small == large:
        raise ValueError(f"both rates are for a batch of {small}; give two different batches")
    per_sample = (large / fast - small / slow) / (large - small)
    if per_sample <= 0:
        raise ValueError(
            f"{small} samples take {small / slow:.4g} s and {large} take {large / fast:.4g} s: that cannot be a line"
        )
    fixed = small / slow - small * per_sample
    if fixed < -CURVED * small / slow:
        raise ValueError(
            f"{small:g} samples take {small / slow:.4g} s and {large:g} take {large / fast:.4g} s: a line through both would take"
            f" {fixed:.4g} s without samples. Are rate and batch swapped, as in BATCH@RATE, or is one of them of another device?"
        )
    return Compute(per_sample, fixed, source=source) if fixed >= 0 else Compute(large / fast / large, source=source)


def resnet(depth: int, pixels: int = 224) -> Model:
    """ResNet-18, -50, -101 or -152 (v1.5) for 1000 classes, tensor by tensor."""
    counts = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}[depth]
    layers = list(_resnet_layers(counts, pixels, bottleneck=depth > 18))
    return _from_layers(f"resnet{depth}", layers)


def vgg16(pixels: int = 224) -> Model:
    """VGG-16 without batch norm: 138 million parameters, most of them in one layer that is ready early."""
    layers, inputs, side = [], 3, pixels
    for i, (width, count) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))):
        for j in range(count):
            layers.append((f"features{i}.{j}", inputs * width * 9, width, side * side * inputs * width * 9.0, False))
            inputs = width
        side //= 2
    for i, (width_in, width_out) in enumerate(((512 * side * side, 4096), (4096, 4096), (4096, 1000))):
        layers.append((f"classifier{i}", width_in * width_out, width_out, float(width_in * width_out), False))
    return _from_layers("vgg16", layers)


def _resnet_layers(counts: tuple[int, ...], pixels: int, *, bottleneck: bool) -> Iterator[tuple[str, int, int, float, bool]]:
    """Name, weights, width, multiplications and whether a batch norm follows, of every layer."""

    def conv(name: str, inputs: int, width: int, size: int, side: int) -> tuple[str, int, int, float, bool]:
        weights = inputs * width * size * size
        return name, weights, width, float(weights * side * side), True

    side = pixels // 2
    yield conv("conv1", 3, 64, 7, side)
    side, inputs = side // 2, 64
    for stage, (width, count) in enumerate(zip((64, 128, 256, 512), counts)):
        for place in range(count):
            name = f"layer{stage + 1}.{place}"
            before, side = side, side // 2 if stage and place == 0 else side
            outputs = 4 * width if bottleneck else width
            if bottleneck:
                yield conv(f"{name}.conv1", inputs, width, 1, before)
                yield conv(f"{name}.conv2", width, width, 3, side)
                yield conv(f"{name}.conv3", width, outputs, 1, side)
            else:
                yield conv(f"{name}.conv1", inputs, width, 3, side)
                yield conv(f"{name}.conv2", width, width, 3, side)
            if inputs != outputs or side != before:
                yield conv(f"{name}.downsample", inputs, outputs, 1, side)
            inputs = outputs
    yield "fc", inputs * 1000, 1000, inputs * 1000.0, False


def _from_layers(name: str, layers: list[tuple[str, int, int, float, bool]]) -> Model:
    total = sum(work for *_, work, _ in layers)
    tensors: list[Tensor] = []
    for layer, weights, width, work, norm in layers:
        share = work / total
        # three convolutions (forward, by input, by weight); batch norm and activation forward and back, additions counted in
        tensors.append(Tensor(f"{layer}.weight", weights, share if not norm else 0.9 * share, 3, width))
        if norm:
            tensors.append(Tensor(f"{layer}.norm.weight", width, 0.1 * share, 2))
            tensors.append(Tensor(f"{layer}.norm.bias", width, 0.0, 0))
        else:
            tensors.append(Tensor(f"{layer}.bias", width, 0.0, 1))
    return Model(name, tuple(tensors))


MODELS = {
    "resnet18": resnet(18),
    "resnet50": resnet(50),
    "resnet101": resnet(101),
    "resnet152": resnet(152),
    "vgg16": vgg16(),
}
