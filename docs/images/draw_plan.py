"""Draws the pictures of docs/planning.md: `python docs/images/draw_plan.py` writes the SVGs beside this file.

The step is simulated when it is drawn; the figures beside published ones are those of benchmarks/results.
"""

from __future__ import annotations

import json
from itertools import pairwise
from math import log2
from pathlib import Path
from typing import Any

from draw import AMBER, BLUE, FAINT, GREY, INK, ROSE, box, picture, text

from phalanx.cluster import MODELS, NCCL, PRESETS, PredictedStep, StepPlan, compile_schedule, from_one, predict_step
from phalanx.cluster.hosts_differ import HOST_SPREAD, typical_slowness
from phalanx.schedule import torus

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ROWS = 6  # ranks that are drawn


def records(name: str) -> list[dict[str, Any]]:
    """The lines of a results file."""
    return [json.loads(line) for line in (RESULTS / name).read_text(encoding="utf-8").splitlines()]


def dot(x: float, y: float, fill: str, radius: float = 4) -> str:
    """A disc."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{fill}"/>'


def line(x1: float, y1: float, x2: float, y2: float, stroke: str, width: float = 1) -> str:
    """A line without a head."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}" stroke-width="{width:g}"/>'


def simulated_step() -> PredictedStep:
    """Fujitsu's: 2,048 V100 of ABCI, 40 images each, 16 bits on the wire, groups of 16 MB of float32."""
    cluster, model = PRESETS["abci"], MODELS["resnet50"]
    compute = from_one(model, 208, 11222 / 8, overhead=records("plan_published.jsonl")[0]["software_overheads_s"]["v0.6"])
    program = compile_schedule(torus(512, 4), cluster, NCCL)
    slowness = typical_slowness(cluster, HOST_SPREAD)
    return predict_step(program, model, compute, 40, StepPlan(group_bytes=16e6, wire=2), slowness=slowness)


def step_picture() -> str:
    """Some ranks, from the fastest host to the slowest: computing above, groups of gradients below."""
    step = simulated_step()
    ranks = step.backward_end.size
    left, wide, high = 96.0, 600.0, 40.0
    scale = wide / step.seconds
    parts = []
    for row in range(ROWS):
        rank, y = row * (ranks - 1) // (ROWS - 1), 50 + row * high
        forward, backward = float(step.forward_end[rank]), float(step.backward_end[rank])
        parts.append(text(20, y + 18, f"rank {rank}", size=12))
        parts.append(box(left, y, forward * scale, 14, GREY, radius=1))
        parts.append(box(left + round(forward * scale, 2), y, round((backward - forward) * scale, 2), 14, BLUE, radius=1))
        for group in step.groups:
            begin, end = float(group.begin[rank]), float(group.end[rank])
            parts.append(box(round(left + begin * scale, 2), y + 16, round((end - begin) * scale, 2), 10, AMBER, radius=1))
    bottom = 50 + ROWS * high + 14
    parts.append(text(left, bottom, "0", size=12, fill=FAINT))
    parts.append(text(left + wide, bottom, f"{step.seconds * 1e3:.1f} ms", size=12, fill=FAINT, anchor="end"))
    for i, (name, colour) in enumerate(
        (("forward", GREY), ("backward", BLUE), ("all-reduce of a group, waiting included", AMBER))
    ):
        parts.append(box(left + 110 * i, 20, 12, 12, colour))
        parts.append(text(left + 110 * i + 18, 31, name, size=12))
    return picture(left + wide + 24, bottom + 18, "A step of ResNet-50 on 2,048 GPUs, simulated", parts)


def published_picture() -> str:
    """Error of every published row, ours and those of the two baselines."""
    rows = sorted((r for r in records("plan_published.jsonl") if "one_node" in r), key=lambda r: r["accelerators"])
    left, wide, high, top = 250.0, 460.0, 15.0, 62.0
    zero, percent = left + 90, (wide - 90) / 150  # pixels per percent; the axis goes from some -25 % to 150 %
    bottom = top + high * len(rows)
    parts = []
    for value in (-20, 0, 20, 50, 100, 150):
        x = zero + value * percent
        parts.append(line(x, top - 8, x, bottom, INK if value == 0 else GREY))
        parts.append(text(x, bottom + 16, f"{value:+d} %" if value else "0", size=11, fill=FAINT, anchor="middle"))
    for i, row in enumerate(rows):
        y = top + high * i + high / 2
        parts.append(text(left + 40, y + 4, f"{row['round']} {row['system'][:28]}, {row['accelerators']}", size=10, anchor="end"))
        for name, colour in (("error_bytes_over_bandwidth", GREY), ("error_no_overlap", AMBER), ("error", BLUE)):
            parts.append(dot(zero + 100 * row[name] * percent, y, colour, 4 if name == "error" else 3))
    names = (("Phalanx", BLUE), ("compute + communication", AMBER), ("bytes over bandwidth", GREY))
    for i, (name, colour) in enumerate(names):
        parts.append(dot(left - 20 + 180 * i, 26, colour))
        parts.append(text(left - 10 + 180 * i, 30, name, size=12))
    return picture(left + wide + 30, bottom + 30, "Errors of predicted throughput on published clusters", parts)


def chainermn_picture() -> str:
    """Efficiency of ChainerMN's speed-ups, predicted as a line, published as dots."""
    points = []
    for row in records("plan_papers.jsonl"):
        if row.get("paper") == "ChainerMN":
            gpus = int(row["what"].split()[-2])
            points.append((gpus, row["predicted"] / gpus, row["published"] / gpus))
    left, wide, top, high = 70.0, 520.0, 50.0, 200.0

    def place(gpus: int, efficiency: float) -> tuple[float, float]:
        return left + wide * log2(gpus) / 7, top + high * (1 - efficiency) / 0.4

    parts = []
    for value in (60, 70, 80, 90, 100):
        y = place(1, value / 100)[1]
        parts.append(line(left, y, left + wide, y, GREY))
        parts.append(text(left - 8, y + 4, f"{value} %", size=11, fill=FAINT, anchor="end"))
    curve = [place(1, 1.0), *(place(gpus, predicted) for gpus, predicted, _ in points)]
    parts += [line(*before, *after, BLUE, 2) for before, after in pairwise(curve)]
    for gpus, _, published in points:
        x, y = place(gpus, published)
        parts.append(dot(x, y, ROSE))
        parts.append(text(x, top + high + 18, str(gpus), size=11, fill=FAINT, anchor="middle"))
    parts.append(dot(left + 10, 26, ROSE))
    parts.append(text(left + 20, 30, "published", size=12))
    parts.append(line(left + 100, 26, left + 124, 26, BLUE, 2))
    parts.append(text(left + 130, 30, "predicted from one GPU", size=12))
    return picture(left + wide + 30, top + high + 34, "ChainerMN's efficiency on 2 to 128 GPUs", parts)


def pictures() -> dict[str, str]:
    """All, by the name of their file."""
    return {"plan_step": step_picture(), "plan_published": published_picture(), "plan_chainermn": chainermn_picture()}


if __name__ == "__main__":
    for name, svg in pictures().items():
        Path(__file__).with_name(f"{name}.svg").write_text(svg, encoding="utf-8")
