"""MNIST and Fashion-MNIST: idx files, gzipped or not.

An idx file is a header of big-endian numbers and then the elements: 0, 0, type (8: unsigned byte), number of dimensions, and each
dimension in four bytes (http://yann.lecun.com/exdb/mnist/). The header is checked against the file.
"""

from __future__ import annotations

import gzip
import io
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import torch

from phalanx.data.source import Arrays, SourceError

UNSIGNED_BYTE = 8
MAX_BYTES = 1 << 30  # of elements: EMNIST, the largest of the family, has 547 MB; a gzipped bomb has more

CLASSES = {
    "mnist": tuple("0123456789"),
    "fashion-mnist": (
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    ),
}  # fmt: skip
TORCHVISION_FOLDER = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST"}


def load(kind: str, directory: str, split: str) -> Arrays:
    """Load the images as uint8 N x 1 x 28 x 28, and their labels."""
    part = "train" if split == "train" else "t10k"
    images_path = find(kind, directory, f"{part}-images", "idx3-ubyte")
    labels_path = find(kind, directory, f"{part}-labels", "idx1-ubyte")
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if len(images) != len(labels):
        raise SourceError(
            f"{images_path} has {len(images)} images, {labels_path} {len(labels)} labels: they do not belong together"
        )
    if len(labels) and int(labels.max()) >= len(CLASSES[kind]):
        raise SourceError(f"{labels_path}: label {int(labels.max())}, but {kind} has {len(CLASSES[kind])} classes")
    return Arrays(torch.from_numpy(images[:, None]), torch.from_numpy(labels).long(), CLASSES[kind], kind)


def find(kind: str, directory: str, stem: str, suffix: str) -> Path:
    """Find the file in `directory` or in torchvision's subfolder, with or without .gz. Some mirrors write a dot for the dash."""
    root = Path(directory).expanduser()
    if not root.is_dir():
        raise SourceError(f"{kind}:{directory}: no such directory; it should hold {stem}-{suffix} or {stem}-{suffix}.gz")
    folders = (root, root / "raw", root / TORCHVISION_FOLDER[kind] / "raw", root / kind)
    for folder in folders:
        for name in (f"{stem}-{suffix}", f"{stem}.{suffix}", f"{stem}-{suffix}.gz", f"{stem}.{suffix}.gz"):
            if (folder / name).is_file():
                return folder / name
    looked = ", ".join(str(folder) for folder in folders)
    raise SourceError(f"{kind}:{directory}: found no {stem}-{suffix}[.gz] in {looked}: download it there, or name its directory")


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """The elements of an idx file of unsigned bytes, which must have this many dimensions."""
    try:
        with path.open("rb") as raw:
            return _read(gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw, path, dimensions)
    except (OSError, EOFError, zlib.error) as error:
        raise SourceError(f"{path}: {error or type(error).__name__}: download it again") from None


def _read(file: gzip.GzipFile | io.BufferedReader, path: Path, dimensions: int) -> np.ndarray:
    head = file.read(4 + 4 * dimensions)
    wanted = bytes((0, 0, UNSIGNED_BYTE, dimensions))
    if head[:2] == b"\x1f\x8b":
        raise SourceError(f"{path} is gzipped: call it {path.name}.gz, or unpack it")
    if head[:4] != wanted:
        raise SourceError(
            f"{path}: begins with {head[:4].hex() or 'nothing'}, wanted {wanted.hex()}: not the idx file it should be"
        )
    if len(head) < 4 + 4 * dimensions:
        raise SourceError(f"{path}: ends inside its header: download it again")
    shape = struct.unpack(f">{dimensions}I", head[4:])
    size = math.prod(shape)
    if size > MAX_BYTES:
        raise SourceError(f"{path}: claims {'x'.join(map(str, shape))} elements; at most {MAX_BYTES} are read")
    elements = np.empty(size, np.uint8)  # pages are touched only as far as the file goes
    view, got = memoryview(elements.data), 0
    while got < size and (more := file.readinto(view[got:])):
        got += more
    if got < size:
        raise SourceError(f"{path}: truncated: {got} of the {size} bytes that its header claims: download it again")
    if file.read(1):
        raise SourceError(f"{path}: longer than the {size} bytes that its header claims: download it again")
    return elements.reshape(shape)
