"""`phalanx show-lr`: show learning rate, batch and momentum of a recipe over its steps, as text, SVG or JSON."""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.numbers import at_least_one
from phalanx.cli.recipes import recipe_names
from phalanx.cli.train import resolve
from phalanx.cli.usage import UsageError

if TYPE_CHECKING:  # torch takes seconds to import, and `phalanx --help` does not need it
    from phalanx.train.config import RunConfig
    from phalanx.train.course import Moment

EXAMPLES = """examples:
  phalanx show-lr digits                                              a plot and a table
  phalanx show-lr imagenet-fujitsu-74s --samples 1281167              count steps without the data
  phalanx show-lr cifar10 --set rate.decay=cosine --svg rate.svg
  phalanx show-lr imagenet-sony-flash --samples 1281167 --json
"""
HEIGHT = 10  # lines of the text plot
POINTS = 400  # of SVG and JSON
ROWS = 10  # of the table, besides the steps at which something changes
BLOCKS = " ▁▂▃▄▅▆▇█"


def add_to(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `show-lr` to the command line."""
    parser = verbs.add_parser(
        "show-lr",
        help="plot the learning rate of a recipe",
        description="Show learning rate, batch and momentum of a recipe over its steps, without training.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", metavar="RECIPE", help=f"a file, or {', '.join(recipe_names())}")
    parser.add_argument(
        "--set",
        metavar="PATH=VALUE",
        action="append",
        default=[],
        dest="settings",
        help="change a setting of the recipe; may be repeated",
    )
    parser.add_argument(
        "--samples", metavar="N", type=at_least_one, help="training samples (default: those of the data, if they are here)"
    )
    parser.add_argument("--svg", metavar="FILE", type=Path, help="also write a picture, for light and dark")
    parser.add_argument("--json", action="store_true", help=f"print the values instead, about {POINTS} at most")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the chosen form."""
    from phalanx.train.config import ConfigError

    try:
        config = resolve(args.recipe, args.settings)
        samples = args.samples if args.samples is not None else count_samples(config)
        points = moments(config, samples, POINTS)
    except ConfigError as error:
        raise UsageError(str(error)) from None
    except (ValueError, ArithmeticError) as error:
        raise UsageError(f"{args.recipe}: {error}") from None
    if args.json:
        print(json.dumps({"recipe": config.name, "samples": samples, "steps": [asdict(moment) for moment in points]}))
    else:
        print(headline(config, samples), draw(points, shutil.get_terminal_size((100, 24)).columns), sep="\n\n", end="\n\n")
        print("\n".join(tabulate(moments(config, samples, ROWS))))
    if args.svg is not None:
        try:
            args.svg.write_text(picture(points, config.name), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {args.svg}: {error.strerror}") from None
    return 0


def count_samples(config: RunConfig) -> int | None:
    """The number of training samples; None if the data are not here."""
    from phalanx.data.source import SourceError

    try:
        return len(config.data.open("train"))
    except (SourceError, OSError):
        return None


def moments(config: RunConfig, samples: int | None, points: int) -> list[Moment]:
    """About `points` evenly spaced steps, plus those at the ends of stages and of the warm-up.

    Without `samples`, steps have no number, and the values are those at the start and end of each epoch.
    """
    course, epochs = config.course, config.epochs
    borders = [sum(stage.epochs for stage in course.plan.stages[:i]) for i in range(len(course.plan.stages) + 1)]
    if samples is None:
        marks = {(min(int(p), epochs - 1), p - min(int(p), epochs - 1)) for p in (epochs * i / points for i in range(points + 1))}
        marks |= {(epoch, 0.0) for epoch in borders[:-1]} | {(epoch - 1, 1.0) for epoch in borders[1:]}
        marks |= {(int(config.rate.warmup), config.rate.warmup % 1)}
        return [course.at(epoch, done) for epoch, done in sorted(marks)]

    def steps(epoch: int) -> int:
        return course.plan.steps_before(epoch, samples, config.data.last)

    total = steps(epochs)
    if total < 1:
        raise ValueError(f"{samples} samples do not fill a batch of {course.plan.stages[0].batch}")
    warm = int(config.rate.warmup)
    numbers = {min(total, round(1 + (total - 1) * i / points)) for i in range(points + 1)} | {
        steps(epoch) for epoch in borders[1:]
    }
    numbers |= {steps(epoch) + 1 for epoch in borders[:-1]}
    numbers |= {steps(warm) + round((config.rate.warmup - warm) * (steps(min(warm + 1, epochs)) - steps(warm)))} - {0}
    return [course.at_step(number, samples, config.data.last) for number in sorted(numbers)]


# ---- forms -------------------------------------------------------------------------------------------------------------------


def headline(config: RunConfig, samples: int | None) -> str:
    """Describe the run in a line."""
    batches = " then ".join(f"{stage.epochs} epochs of batch {stage.batch:,}" for stage in config.plan.stages)
    if samples is None:
        return f"{config.name}: {batches}; the data are not here: use --samples N to count steps"
    steps = config.plan.steps_before(config.epochs, samples, config.data.last)
    return f"{config.name}: {batches}; {steps:,} steps on {samples:,} samples"


def draw(points: list[Moment], width: int) -> str:
    """Plot the rate over the epochs as text, at most `width` characters wide."""
    peak, end = max(point.rate for point in points), points[-1].progress
    name = max(len(f"{peak:.4g}"), len(f"{peak / 2:.4g}"))
    columns = max(20, min(width - name - 3, 100))
    rates = [min(points, key=lambda p: abs(p.progress - end * (i + 0.5) / columns)).rate for i in range(columns)]
    lines = []
    for row in reversed(range(HEIGHT)):
        label = {HEIGHT - 1: f"{peak:.4g}", HEIGHT // 2 - 1: f"{peak / 2:.4g}"}.get(row, "")
        filled = (round(8 * HEIGHT * rate / (peak or 1.0)) - 8 * row for rate in rates)
        lines.append(f"{label:>{name}} │{''.join(BLOCKS[max(0, min(8, eighths))] for eighths in filled)}".rstrip())
    lines.append(f"{'0':>{name}} └{'─' * columns}")
    half = f"{end / 2:g}"
    lines.append(f"{'':{name}}  0{half:>{columns // 2}}{f'{end:g} epochs':>{columns - columns // 2 - 1}}")
    return "\n".join(lines)


def tabulate(points: list[Moment]) -> list[str]:
    """One line per moment, below a heading."""
    rows = [("step", "epoch", "batch", "rate", "momentum")]
    for point in points:
        step = "" if point.number is None else f"{point.number:,}"
        momentum = "" if point.momentum is None else f"{point.momentum:.6g}"
        rows.append((step, f"{point.progress:.4g}", f"{point.batch:,}", f"{point.rate:.6g}", momentum))
    kept = [column for column in zip(*rows) if any(column[1:])]
    widths = [max(map(len, column)) for column in kept]
    return ["  ".join(f"{cell:>{wide}}" for cell, wide in zip(row, widths)) for row in zip(*kept)]


def picture(points: list[Moment], name: str) -> str:
    """The rate over the epochs as an SVG file."""
    from phalanx.train.report.plots import Series, plot_lines, stand_alone

    line = Series("learning rate", tuple(p.progress for p in points), tuple(p.rate for p in points))
    return stand_alone(plot_lines([line], title=f"learning rate of {name}", x="epochs", zero=True))
