"""The summary lines at the start of a run: pure functions from values to lines.

digits
  model       small_cnn
  ranks       2 on 1 host
  backend     shared memory
  schedule    ring(2)
  batch       60, 30 per rank
  epochs      24
  output      runs/digits
"""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Mapping
from typing import Any

from phalanx.train.config import RunConfig

LABEL = 12  # characters before a value
NARROWEST = 20  # characters of a value, even on a narrower terminal


def banner(title: str, facts: Mapping[str, str], width: int) -> list[str]:
    """A title and a line per fact. A fact that is too long for `width` continues on the next line."""
    return [title, *fact_lines(facts, width)]


def fact_lines(facts: Mapping[str, str], width: int) -> list[str]:
    """The lines of the facts. A long word, such as a path, is not split, so that you can copy it."""
    lines = []
    for label, value in facts.items():
        room = max(NARROWEST, width - LABEL - 2)
        first, *more = textwrap.wrap(value, room, break_long_words=False, break_on_hyphens=False) or [""]
        lines.append(f"  {label:<{LABEL}}{first}")
        lines += [f"  {'':<{LABEL}}{line}" for line in more]
    return lines


def run_facts(config: RunConfig, *, ranks: int, hosts: int, backend: str, schedule: str, out: str) -> dict[str, str]:
    """The facts that are known before the data are open."""
    return {
        "model": config.model.name,
        "ranks": f"{ranks} on {hosts} host{'s' * (hosts > 1)}" if ranks > 1 else "1",
        "backend": backend,
        "schedule": schedule,
        "batch": describe_batch(config, ranks),
        "epochs": f"{config.epochs}",
        "output": out,
    }


def describe_batch(config: RunConfig, ranks: int) -> str:
    """The first batch of the plan, and how ranks divide it. One that cannot be divided raises later."""
    first, stages = config.plan.stages[0], len(config.plan.stages)
    text = f"{first.batch:,}"
    with contextlib.suppress(ValueError):
        micro = first.split(ranks, config.micro_batch).micro_steps
        text += f", {first.batch // ranks:,} per rank" + (f" in {micro} passes" if micro > 1 else "")
    return text + (f"; {stages} stages" if stages > 1 else "")


def data_facts(*, parameters: int, samples: tuple[int, int]) -> dict[str, str]:
    """The facts that are known once the data are open and the network is built."""
    return {"parameters": f"{parameters:,}", "samples": f"{samples[0]:,} to train, {samples[1]:,} to test"}


def name_backend(*, ranks: int, device: str, threads: bool, shares_memory: bool) -> str:
    """What carries gradients between the ranks."""
    names: list[tuple[Any, str]] = [
        (ranks == 1, "none, one rank"),
        (threads, "threads of one process"),
        (device == "cuda", "NCCL"),
        (shares_memory, "shared memory"),
    ]
    return next((name for holds, name in names if holds), "gloo")
