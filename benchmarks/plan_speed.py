"""How fast the planner is: simulated messages per second, a step of ResNet-50 on 4,096 ranks, full plans for them and for 65,536.

    python benchmarks/plan_speed.py [--repeat 5] [--json FILE]

Every simulation computes every round of every ring (`shortcut=False`) where it says so; the plan uses the shortcut, as users do.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.cluster import (
    GLOO,
    MODELS,
    NCCL,
    PLAIN,
    PRESETS,
    StepPlan,
    Uplink,
    compile_schedule,
    from_one,
    predict_step,
    run,
    uniform,
)
from phalanx.cluster.hosts_differ import typical_slowness
from phalanx.cluster.plan import make_plan
from phalanx.cluster.question import Question
from phalanx.schedule import ring, torus

RANKS = 4096
MODEL = MODELS["resnet50"]
COMPUTE = from_one(MODEL, 408, 3293)


def timed(function: Callable[[], Any], repeat: int) -> float:
    seconds = []
    for _ in range(repeat):
        begun = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def measure(repeat: int) -> list[dict[str, Any]]:
    own, shared = PRESETS["dgx-a100"].with_ranks(RANKS), PRESETS["abci"].with_ranks(RANKS)
    racks = replace(shared, uplink=Uplink(16, 10 * shared.network.bandwidth))
    flat = uniform(RANKS, latency=5e-6, bandwidth=12.5e9)
    rows: list[dict[str, Any]] = []
    for name, cluster, schedule in (
        ("torus 64x64, a port per rank", flat, torus(64, 64)),
        ("torus 512x8, 8 ports per host of 8", own, torus(512, 8)),
        ("ring of 4096", flat, ring(RANKS)),
        ("torus 1024x4, 2 ranks share a port", shared, torus(1024, 4)),
        ("torus 512x8, 8 ranks share a port", PRESETS["cloud-25g"].with_ranks(RANKS), torus(512, 8)),
        ("the same as the last but one, in racks of 16 hosts with thin uplinks", racks, torus(1024, 4)),
    ):
        program = compile_schedule(schedule, cluster, PLAIN)
        seconds = timed(lambda program=program: run(program, 25e6, shortcut=False), repeat)
        rows.append({"what": f"every message: {name}", "seconds": seconds, "messages_per_s": program.messages / seconds})
    for name, cluster, schedule in (("a port per rank", flat, torus(64, 64)), ("8 ports per host", own, torus(512, 8))):
        slowness = typical_slowness(cluster, 0.02)

        def step(schedule=schedule, cluster=cluster, slowness=slowness) -> None:
            predict_step(compile_schedule(schedule, cluster, PLAIN), MODEL, COMPUTE, 16, StepPlan(), slowness=slowness)

        rows.append({"what": f"a step, 25 MB groups, compiled anew: {schedule.name}, {name}", "seconds": timed(step, repeat)})
    families = ("ring", "torus", "hierarchical", "tree", "gossip")
    question = Question(own, MODEL, COMPUTE, NCCL, 16 * RANKS, wires=(2,), families=families)
    rows.append(
        {"what": "a full plan: all grids x 6 group sizes x 5 algorithms", "seconds": timed(lambda: make_plan(question), 1)}
    )
    rows[-1]["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    for name, cluster, profile in (
        ("65,536 ranks of dgx-a100, NCCL, five algorithms", PRESETS["dgx-a100"].with_ranks(65536), NCCL),
        ("4,096 ranks of cloud-25g, gloo, five algorithms", PRESETS["cloud-25g"].with_ranks(RANKS), GLOO),
    ):
        question = Question(cluster, MODEL, COMPUTE, profile, 16 * cluster.ranks, wires=(2,))
        begun, cpu = time.perf_counter(), time.process_time()
        make_plan(question)
        seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
        rows.append({"what": f"a full plan: {name}", "seconds": seconds, "cpu_s": cpu})
        rows[-1]["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = measure(args.repeat)
    for row in rows:
        rate = f"  {row['messages_per_s']:.3g} messages/s" if "messages_per_s" in row else ""
        peak = f"  peak {row['peak_mib']:.0f} MiB" if "peak_mib" in row else ""
        print(f"{row['seconds']:8.3f} s{rate}{peak}  {row['what']}")
    if args.json:
        head = {
            "config": {"verb": "plan_speed", "ranks": RANKS, "repeat": args.repeat},
            "date": time.strftime("%Y-%m-%d"),
            "versions": {"python": platform.python_version(), "numpy": np.__version__},
        }
        args.json.write_text("".join(json.dumps(line) + "\n" for line in (head, *rows)), encoding="utf-8")


if __name__ == "__main__":
    main()
