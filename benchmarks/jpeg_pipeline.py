"""Photographs to training batches: Phalanx's loader against Pillow and torch's DataLoader, with the limit beside them.

    python benchmarks/jpeg_pipeline.py [--data DIR] [--workers 1 2] [--batches 16] [--repeat 5] [--json FILE]

Random resized crop to 224, mirroring, normalisation, batches of 64, one torch thread per worker. `--data` is a folder of JPEGs,
at any depth; without it photographs are invented, and the record says so. They are measured as they are and, since ImageNet's
have more bytes, a second time enlarged by 5/4 and encoded at quality 90.

    phalanx          Loader with threads, RandomResizedCrop and Normalise
    phalanx proc.    the same with processes
    pillow           a Dataset with PIL.Image.open(...).convert("RGB"), crop, resize, mirror, to float, normalise; DataLoader
    decode           the limit: libjpeg-turbo alone, in full size, in as many threads
    decode + crop    RandomResizedCrop alone: what the loader adds is the difference

Contenders take turns, `--repeat` times. Within a turn the clock starts after the batches that may have been prefetched, and
between two turns there is a pause in which prefetching comes to its end.
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import math
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from phalanx.data import Draws, Loader, Normalise, RandomResizedCrop

SIZE, BATCH = 224, 64
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PREFETCHED = 5  # batches before the clock starts: more than either loader holds ready with two workers
PAUSE = 0.6  # seconds in which prefetching ends


# ---- the contenders ----------------------------------------------------------------------------------------------------------


class Files:
    """An encoded source: some files and the label 0."""

    classes = ("photograph",)

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: Any) -> tuple[bytes, int]:
        return self.read(i), 0

    def read(self, i: Any) -> bytes:
        return self.paths[i].read_bytes()

    def label(self, i: Any) -> int:
        return 0

    def name(self, i: Any) -> str:
        return str(self.paths[i])


class ByPillow(Dataset):
    """What people write: torchvision's RandomResizedCrop, RandomHorizontalFlip, ToTensor and Normalize, by hand."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        self.mean, self.std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        with self.paths[i].open("rb") as file:
            image = Image.open(file).convert("RGB")
        top, left, height, width = self._box(image.height, image.width)
        image = image.crop((left, top, left + width, top + height)).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        x = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div_(255)
        return x.sub_(self.mean).div_(self.std), 0

    def _box(self, height: int, width: int) -> tuple[int, int, int, int]:
        for _ in range(10):
            area = height * width * random.uniform(0.08, 1.0)
            aspect = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
            w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < w <= width and 0 < h <= height:
                return random.randint(0, height - h), random.randint(0, width - w), h, w
        side = min(height, width)
        return (height - side) // 2, (width - side) // 2, side, side


def images_per_second(batches: Iterable[Any]) -> float:
    """Of a loader in its stride."""
    seen = 0
    for number, (x, _) in enumerate(batches):
        if number < PREFETCHED:
            begun = time.perf_counter()
        else:
            seen += len(x)
    return seen / (time.perf_counter() - begun)


def in_threads(workers: int, work: Callable[[int], Any], count: int) -> float:
    """Images per second of `work(i)` for i < count, cut into as many parts as there are workers."""
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda _: torch.set_num_threads(1), range(workers)))
        begun = time.perf_counter()
        list(pool.map(lambda first: [work(i) for i in range(first, count, workers)] and None, range(workers)))
        return count / (time.perf_counter() - begun)


def measure(paths: list[Path], what: str, workers: int, repeat: int) -> Iterator[dict[str, Any]]:
    """The rows of one set of photographs and one number of workers."""
    data = [path.read_bytes() for path in paths[: 8 * BATCH]]
    crop, draws = RandomResizedCrop(SIZE), Draws(0, 0, np.arange(len(data)))
    theirs = DataLoader(
        ByPillow(paths), BATCH, shuffle=True, drop_last=True, num_workers=workers, persistent_workers=True, timeout=60
    )
    loader = functools.partial(Loader, Files(paths), batch=BATCH, decode=crop, transform=Normalise(MEAN, STD), workers=workers)
    with loader() as threads, loader(kind="process") as processes:
        contenders: dict[str, Callable[[], float]] = {
            "phalanx": lambda: images_per_second(threads),
            "phalanx proc.": lambda: images_per_second(processes),
            "pillow": lambda: images_per_second(theirs),
            "decode": lambda: in_threads(workers, lambda i: simplejpeg.decode_jpeg(data[i]), len(data)),
            "decode + crop": lambda: in_threads(workers, lambda i: crop(data[i], draws[i]), len(data)),
        }
        speeds: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(repeat):
            for name, run in contenders.items():
                speeds[name].append(run())
                time.sleep(PAUSE)
    cores = min(workers, len(os.sched_getaffinity(0)))
    median = {name: statistics.median(values) for name, values in speeds.items()}
    for name, values in speeds.items():
        yield {
            "photographs": what,
            "workers": workers,
            "contender": name,
            "images_per_second": median[name],
            "per_core": median[name] / cores,
            "times_pillow": median[name] / median["pillow"],
            "times_decode": median[name] / median["decode"],
            "slowest": min(values),
            "fastest": max(values),
            "repeat": repeat,
        }


# ---- the photographs ---------------------------------------------------------------------------------------------------------


def invented(directory: Path, count: int) -> list[Path]:
    """Pictures of 400 x 533 pixels with structure at every scale."""
    rng = np.random.default_rng(0)
    paths = []
    for number in range(count):
        image = np.full((533, 400, 3), 128.0)
        for cells in (3, 10, 30, 90):
            noise = Image.fromarray(rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
            image += (np.asarray(noise.resize((400, 533), Image.Resampling.BICUBIC), dtype=float) - 128) * 3 / cells
        paths.append(directory / f"{number}.jpg")
        Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(paths[-1], quality=85)
    return paths


def enlarged(paths: list[Path], directory: Path) -> list[Path]:
    """The same by 5/4, at quality 90."""
    made = [directory / f"{number}.jpg" for number in range(len(paths))]
    for path, new in zip(paths, made):
        image = Image.open(path).convert("RGB")
        larger = image.resize((image.width * 5 // 4, image.height * 5 // 4), Image.Resampling.BICUBIC)
        stream = io.BytesIO()
        larger.save(stream, "JPEG", quality=90)
        new.write_bytes(stream.getvalue())
    return made


def describe(paths: list[Path], origin: str) -> dict[str, Any]:
    sizes = [simplejpeg.decode_jpeg_header(path.read_bytes())[:2] for path in paths]
    return {
        "origin": origin,
        "count": len(paths),
        "mean_bytes": round(statistics.mean(path.stat().st_size for path in paths)),
        "median_pixels": f"{statistics.median(w for _, w in sizes):.0f}x{statistics.median(h for h, _ in sizes):.0f}",
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| photographs | workers | contender | images/s | per core | x pillow | x decode |", "|---|---|---|---|---|---|---|"]
    lines += [
        f"| {r['photographs']} | {r['workers']} | {r['contender']} | {r['images_per_second']:.0f} | {r['per_core']:.0f} "
        f"| {r['times_pillow']:.2f} | {r['times_decode']:.2f} |"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder of JPEGs")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batches", type=int, default=16, help="of one turn, the first 5 of them unmeasured")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the rows there")
    args = parser.parse_args()
    if args.batches <= PREFETCHED:
        parser.error(f"--batches: more than {PREFETCHED}")
    torch.set_num_threads(1)
    count = args.batches * BATCH
    with tempfile.TemporaryDirectory() as scratch:
        small, large = Path(scratch, "small"), Path(scratch, "large")
        small.mkdir()
        large.mkdir()
        found = sorted(args.data.rglob("*.jpg")) if args.data else []
        random.Random(0).shuffle(found)
        paths = (found * -(-count // len(found)))[:count] if found else invented(small, count)
        sets = {"as they are": paths, "enlarged": enlarged(paths, large)}
        header = {
            "what": "JPEG pipeline",
            "date": time.strftime("%Y-%m-%d"),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "simplejpeg": version("simplejpeg"),
            "pillow": version("pillow"),
            "cores": len(os.sched_getaffinity(0)),
            "size": SIZE,
            "batch": BATCH,
            "photographs": {
                name: describe(some, "files" if found else "invented, not photographs") for name, some in sets.items()
            },
        }
        print(f"# {json.dumps(header)}")
        rows = [row for name, some in sets.items() for w in args.workers for row in measure(some, name, w, args.repeat)]
    print(table(rows))
    if args.json:
        args.json.write_text("\n".join(json.dumps(row) for row in [header, *rows]) + "\n")


if __name__ == "__main__":
    main()
