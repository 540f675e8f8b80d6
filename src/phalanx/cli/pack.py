"""`phalanx pack`: make tar shards from a folder of images."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from typing import Any

from phalanx.cli.numbers import at_least_one, parse_size, size, whole
from phalanx.cli.terminal import tell
from phalanx.cli.usage import UsageError

SIZE = "256M"

EXAMPLES = """examples:
  phalanx pack imagefolder:imagenet shards/train-%05d.tar
  phalanx pack imagefolder:imagenet shards/val-%05d.tar --split val
  phalanx pack imagefolder:photos photos-%02d.tar --count 1000 --shuffle 0
then, in Python: phalanx.data.open("shards:shards/{split}-*.tar", "train")
"""


def add_to(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `pack` to the command line."""
    parser = verbs.add_parser(
        "pack",
        help="make tar shards from a folder of images",
        description="Make tar shards in WebDataset's layout from a folder of images. The bytes of the images do not change.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "source",
        metavar="imagefolder:DIR",
        help="a folder with one folder of images per class, or with train/ and val/ that have such folders",
    )
    parser.add_argument("pattern", metavar="OUT", help="names of the shards, with one %%d or %%06d for their number")
    parser.add_argument("--split", default="train", help="train, val, validation or test (default train)")
    full = parser.add_mutually_exclusive_group()
    full.add_argument("--size", metavar="SIZE", type=size, help=f"maximum bytes per shard, such as 64M or 1G (default {SIZE})")
    full.add_argument("--count", metavar="N", type=at_least_one, help="samples per shard, instead of bytes")
    parser.add_argument("--shuffle", metavar="SEED", type=whole(0), help="shuffle with this seed (default: class by class)")
    parser.add_argument("--skip-bad", action="store_true", help="skip unreadable and empty files, and list them")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Pack, and print the spec that opens the shards; return 1 if a file cannot be read or written."""
    from phalanx.data.image import BadSample  # here, because it imports torch, which other verbs do not need
    from phalanx.data.order import epoch_order
    from phalanx.data.source import SourceError
    from phalanx.data.sources.pack import Limit, ShardNames, pack

    source = _opened(args.source, args.split)
    n = len(source)
    try:
        names = ShardNames.parse(args.pattern)
        progress = PackProgress(n)
        done = pack(
            source,
            names,
            Limit(samples=args.count) if args.count else Limit(bytes=args.size or parse_size(SIZE)),
            order=range(n) if args.shuffle is None else epoch_order(args.shuffle, 0, n),
            skip_bad=args.skip_bad,
            told=progress,
        )
    except SourceError as error:
        raise UsageError(str(error)) from None
    except BadSample as error:
        return _failed(f"{error}; --skip-bad skips such files")
    except OSError as error:
        return _failed(f"cannot write the shards: {error}")
    progress.finish()
    for name, reason in done.skipped.examples:
        tell(f"left out: {reason if name in reason else f'{name}: {reason}'}")
    if more := done.skipped.count - len(done.skipped.examples):
        tell(f"and {more} more")
    done_text = f"{done.samples} images of {len(source.classes)} classes in {len(done.paths)} shards"
    tell(f"{done_text}{f', {done.skipped.count} left out' if done.skipped.count else ''}")
    print(names.spec(len(done.paths)))
    return 0


def _opened(spec: str, split: str) -> Any:
    """Open the folder of images. Its warnings become lines on standard error."""
    from phalanx.data.source import SourceError
    from phalanx.data.source import open as open_source

    if not spec.startswith("imagefolder:"):
        raise UsageError(f"{spec!r}: only imagefolder:DIR can be packed")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            source = open_source(spec, split)
    except SourceError as error:
        raise UsageError(str(error)) from None
    for warning in said:
        tell(warning.message)
    return source


def _failed(message: str) -> int:
    tell(message)
    return 1


class PackProgress:
    """A counter on standard error: redrawn in place on a terminal, an occasional line elsewhere."""

    def __init__(self, total: int) -> None:
        self.total, self.terminal = total, sys.stderr.isatty()
        self.screen = getattr(sys.stderr, "own", sys.stderr) if self.terminal else sys.stderr  # `own` accepts a carriage return
        self.next = time.monotonic() + (0 if self.terminal else 10)

    def __call__(self, samples: int, shards: int) -> None:
        now = time.monotonic()
        if now >= self.next:
            self.next = now + (0.2 if self.terminal else 10)
            text = f"{samples} of {self.total} images, shard {shards}"
            print(f"\r{text} " if self.terminal else text, end="" if self.terminal else "\n", file=self.screen, flush=True)

    def finish(self) -> None:
        if self.terminal:
            print(f"\r{' ' * 60}\r", end="", file=self.screen, flush=True)
