"""CIFAR-10 and CIFAR-100 in the binary and in the python version (https://www.cs.toronto.edu/~kriz/cifar.html).

binary    records of 1 label (CIFAR-100: coarse, then fine) and 3072 pixels: red, green, blue, each row by row
python    pickles of {b"data": N x 3072 bytes, b"labels" or b"fine_labels": N numbers}, read as plain data
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from phalanx.data.source import Arrays, SourceError
from phalanx.data.sources.plain_pickle import Array, PickleRefused, load_plain

PIXELS = 3 * 32 * 32
MAX_BYTES = 1 << 30  # of one file: the largest, CIFAR-100's, has 156 MB

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR100 = (
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle", "bowl", "boy", "bridge",
    "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle", "chair", "chimpanzee", "clock", "cloud", "cockroach",
    "couch", "crab", "crocodile", "cup", "dinosaur", "dolphin", "elephant", "flatfish", "forest", "fox", "girl", "hamster",
    "house", "kangaroo", "keyboard", "lamp", "lawn_mower", "leopard", "lion", "lizard", "lobster", "man", "maple_tree",
    "motorcycle", "mountain", "mouse", "mushroom", "oak_tree", "orange", "orchid", "otter", "palm_tree", "pear", "pickup_truck",
    "pine_tree", "plain", "plate", "poppy", "porcupine", "possum", "rabbit", "raccoon", "ray", "road", "rocket", "rose", "sea",
    "seal", "shark", "shrew", "skunk", "skyscraper", "snail", "snake", "spider", "squirrel", "streetcar", "sunflower",
    "sweet_pepper", "table", "tank", "telephone", "television", "tiger", "tractor", "train", "trout", "tulip", "turtle",
    "wardrobe", "whale", "willow_tree", "wolf", "woman", "worm",
)  # fmt: skip


@dataclass(frozen=True)
class Version:
    """The location of one version of a data set, and how its records begin."""

    folder: str  # as the archive unpacks
    train: tuple[str, ...]
    test: tuple[str, ...]
    label_bytes: int = 0  # before the pixels, the fine label last; 0: a pickle
    label_key: str = ""


BATCHES = tuple(f"data_batch_{k}" for k in range(1, 6))
LAYOUTS = {
    "cifar10": (
        Version("cifar-10-batches-bin", tuple(f"{name}.bin" for name in BATCHES), ("test_batch.bin",), label_bytes=1),
        Version("cifar-10-batches-py", BATCHES, ("test_batch",), label_key="labels"),
    ),
    "cifar100": (
        Version("cifar-100-binary", ("train.bin",), ("test.bin",), label_bytes=2),
        Version("cifar-100-python", ("train",), ("test",), label_key="fine_labels"),
    ),
}
CLASSES = {"cifar10": CIFAR10, "cifar100": CIFAR100}


def load(kind: str, directory: str, split: str) -> Arrays:
    """Load the images as uint8 N x 3 x 32 x 32, and their labels."""
    layout, paths = find(kind, directory, split)
    parts = [read_binary(path, layout) if layout.label_bytes else read_python(path, layout) for path in paths]
    for path, (_, labels) in zip(paths, parts):
        if int(labels.max()) >= len(CLASSES[kind]) or int(labels.min()) < 0:
            raise SourceError(
                f"{path}: labels from {labels.min()} to {labels.max()}, but {kind} has {len(CLASSES[kind])} classes"
            )
    x = torch.from_numpy(np.concatenate([images for images, _ in parts]).reshape(-1, 3, 32, 32))
    y = torch.from_numpy(np.concatenate([labels for _, labels in parts]).astype(np.int64))
    return Arrays(x, y, CLASSES[kind], kind)


def find(kind: str, directory: str, split: str) -> tuple[Version, list[Path]]:
    """Find the first version with all its files, in `directory` itself or in the folder of its archive."""
    root = Path(directory).expanduser()
    if not root.is_dir():
        raise SourceError(
            f"{kind}:{directory}: no such directory; it should hold {LAYOUTS[kind][0].folder}, the unpacked archive"
        )
    incomplete = []
    for layout in LAYOUTS[kind]:
        names = layout.train if split == "train" else layout.test
        for folder in (root, root / layout.folder):
            paths = [folder / name for name in names]
            missing = [path for path in paths if not path.is_file()]
            if not missing:
                return layout, paths
            if len(missing) < len(paths):
                incomplete.append(f"{missing[0]} is missing beside {len(paths) - len(missing)} others")
    looked = " or ".join(
        f"{layout.train[0] if split == 'train' else layout.test[0]} (as in {layout.folder})" for layout in LAYOUTS[kind]
    )
    cause = "; ".join(incomplete) or f"found no {looked}"
    raise SourceError(f"{kind}:{directory}: {cause}: unpack the archive there, or name the directory where it is")


def read_binary(path: Path, layout: Version) -> tuple[np.ndarray, np.ndarray]:
    """Pixels and labels of one file of records."""
    record = layout.label_bytes + PIXELS
    data = np.frombuffer(_content(path), np.uint8)
    if not len(data) or len(data) % record:
        raise SourceError(f"{path}: {len(data)} bytes are not whole records of {record}: truncated, or another format")
    rows = data.reshape(-1, record)
    return rows[:, layout.label_bytes :], rows[:, layout.label_bytes - 1]


def read_python(path: Path, layout: Version) -> tuple[np.ndarray, np.ndarray]:
    """Pixels and labels of one pickle. Nothing in it is executed."""
    try:
        value = load_plain(_content(path))
    except PickleRefused as refusal:
        raise SourceError(f"{path}: refused: {refusal}; download it from its own site") from None
    entries = {k.decode("latin-1") if isinstance(k, bytes) else k: v for k, v in value.items()} if isinstance(value, dict) else {}
    data, labels = entries.get("data"), entries.get(layout.label_key)
    if not isinstance(data, Array) or data.value is None or data.value.ndim != 2 or data.value.shape[1] != PIXELS:
        raise SourceError(f"{path}: holds no `data` of N x {PIXELS} bytes: another file, or damaged")
    if isinstance(labels, Array) and labels.value is not None and labels.value.ndim == 1:
        labels = labels.value.tolist()
    if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < 256 for label in labels):
        raise SourceError(f"{path}: `{layout.label_key}` is not a list of labels: another file, or damaged")
    if not labels or len(labels) != len(data.value):
        raise SourceError(f"{path}: {len(data.value)} images but {len(labels)} labels: damaged")
    return data.value, np.array(labels, np.uint8)


def _content(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise SourceError(f"{path}: {size} bytes are more than any of CIFAR's files has")
        return path.read_bytes()
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from None
