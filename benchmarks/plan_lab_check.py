"""The planner against steps and all-reduces that were measured on emulated hosts (plan_lab.py): predicted beside measured.

    python benchmarks/plan_lab_check.py [--rows FILE] [--json FILE]

A backend's profile is fitted to the rows of three networks, CALIBRATION, and tried on the others. Emulated hosts share cores of
one machine, which no cluster does: what software takes per message and per byte is multiplied by busy ranks per core.
Of a step without communication the planner is told what it took, as a user would measure it on one device.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks.* also when run as a script

import numpy as np
from benchmarks.plan_lab import MIB, NETWORKS, Network

from phalanx.bench.gossip import FORWARD, LAYERS
from phalanx.cluster import GLOO, SHARED_MEMORY, BackendProfile, Compute, Model, StepPlan, compile_schedule, predict_step, run
from phalanx.cluster.calibrate import BOUNDS, fit_any
from phalanx.cluster.candidates import FAMILIES, Algorithm, algorithms
from phalanx.cluster.program import Moves, Phase, Program, connections
from phalanx.cluster.screen import choose
from phalanx.cluster.workload import Tensor

CALIBRATION = (NETWORKS[0], NETWORKS[2], NETWORKS[3])  # ranks that share hosts; a fast network; one with delay
# software takes as long for a message inside a host: gloo sends it through the same sockets
FITTED = {name: BOUNDS[name] for name in ("start", "message", "network", "inside")} | {
    "memory": (1e8, 1e11),
    "queue": (1e-5, 0.1),
}
CORES = 2  # of the machine that the rows were measured on
Row = dict[str, Any]


def network_of(row: Row) -> Network:
    return Network(**{field.name: row[field.name] for field in fields(Network)})


def algorithm_of(row: Row) -> Algorithm:
    """By its name, or the only one of a family."""
    found = {algorithm.name: algorithm for algorithm in algorithms(network_of(row).cluster(), FAMILIES)}
    name = row["algorithm"]
    return found[name] if name in found else next(a for a in found.values() if a.family == name)


def seconds_of(row: Row, profile: BackendProfile, alone: float) -> float:
    """The row, predicted; `alone` is what a step without communication took."""
    network = network_of(row)
    cluster, algorithm = network.cluster(), algorithm_of(row)
    programs = (compile_schedule(algorithm.make(number), cluster, profile) for number in range(algorithm.rounds))
    first, *others = (taking_turns(program) for program in programs)
    if row["what"] == "all-reduce":
        return run(first, row["nbytes"]).seconds
    model = Model("emulated", tuple(Tensor(str(i), network.nbytes // 4 // LAYERS, 1 / LAYERS, 0) for i in range(LAYERS)))
    compute = Compute(0.0, network.compute, FORWARD, optimizer=max(0.0, alone - network.compute))
    if algorithm.gossips:
        plan = StepPlan(sync="gossip")
    else:
        plan = StepPlan(group_bytes=row["group_bytes"])
    return predict_step(first, model, compute, 1, plan, rounds=others).seconds


def predict(rows: list[Row], profile: BackendProfile, alone: dict[Network, float]) -> list[float]:
    """Seconds of every row; `alone` has the steps without communication, by network."""
    return [seconds_of(row, crowded(profile, network_of(row)), alone[network_of(row)]) for row in rows]


def taking_turns(program: Program) -> Program:
    """A program whose messages are handled on few cores: those of as many ranks as a step has, core by core."""
    phases: list[Phase] = []
    for phase in program.phases:
        if isinstance(phase, Moves):
            busy = np.union1d(phase.one.src, phase.one.dst).size
            phase = replace(phase, software=phase.software * max(1.0, busy / CORES))
        phases.append(phase)
    return replace(program, phases=tuple(phases))


def crowded(profile: BackendProfile, network: Network) -> BackendProfile:
    """The profile of one rank per core as ranks find it that share cores, for what all do at once. Shared memory on a host."""
    turns = max(1.0, network.hosts * network.per_host / CORES)
    calls = SHARED_MEMORY.calls if network.per_host > 1 else profile.calls
    return replace(
        profile,
        calls=calls,
        start=profile.start * turns,
        message_inside=profile.message,
        inside=profile.inside / turns,
        memory=profile.memory / turns,
    )


def calibrated(rows: list[Row], alone: dict[Network, float]) -> BackendProfile:
    """A profile from the networks that may be looked at."""
    known = [row for row in rows if network_of(row) in CALIBRATION]
    profile, residual = fit_any(GLOO, lambda tried: predict(known, tried, alone), [row["seconds"] for row in known], FITTED)
    return replace(profile, residual=residual)


def delay_of(row: Row) -> str:
    """The lab has two kinds of wire, one of them without delay."""
    return "without delay" if row["delay"] == "0ms" else "with delay"


def choices(rows: list[Row]) -> list[Row]:
    """By network: the all-reduce step that was predicted to be the best, and how much more than the best it took."""
    by_network = defaultdict(list)
    for row in rows:
        if row["what"] == "step" and not row["algorithm"].startswith("gossip"):
            by_network[network_of(row)].append(row)
    found = []
    for network, own in by_network.items():
        chosen = own[choose([(row["predicted"], row["connections"], -row["group_bytes"]) for row in own])]
        best = min(own, key=lambda row: row["seconds"])
        lost = chosen["seconds"] / best["seconds"] - 1
        found.append({"network": asdict(network), "chosen": describe(chosen), "best": describe(best), "lost": lost})
    return found


def describe(row: Row) -> str:
    return f"{row['algorithm']}, groups of {row['group_bytes'] >> 20} MiB"


def errors(rows: list[Row]) -> dict[str, float]:
    values = np.abs([row["error"] for row in rows])
    if not values.size:
        return {"rows": 0}
    return {
        "rows": int(values.size),
        "median": float(np.median(values)),
        "p95": float(np.quantile(values, 0.95)),
        "worst": float(values.max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=Path(__file__).parent / "results" / "plan_lab.jsonl")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.rows.read_text().splitlines()]
    rows = [row for row in rows if "hosts" in row]
    alone = {network_of(row): row["seconds"] for row in rows if row["algorithm"] == "none"}
    rows = [row for row in rows if row["algorithm"] != "none"]
    profile = calibrated(rows, alone)
    for row, seconds in zip(rows, predict(rows, profile, alone)):
        program = compile_schedule(algorithm_of(row).make(0), network_of(row).cluster(), profile)
        row |= {"predicted": seconds, "error": seconds / row["seconds"] - 1, "connections": connections(program)}
    tested = [row for row in rows if network_of(row) not in CALIBRATION]
    for row in rows:
        size = row.get("nbytes", row.get("group_bytes", 0)) >> 20
        print(
            f"{row['hosts']}x{row['per_host']} {row['rate']:8s} {row['delay']:4s} {row['what']:10s} {row['algorithm']:20s}"
            f" {size:3d} MiB {row['seconds'] * 1e3:9.1f} {row['predicted'] * 1e3:9.1f} ms {row['error']:+7.1%}"
            f"{'' if row in tested else '  (calibration)'}"
        )
    summary: dict[str, Any] = {"profile": {name: getattr(profile, name) for name in (*FITTED, "residual")}}
    for delay in ("without delay", "with delay"):
        own = [row for row in tested if delay_of(row) == delay]
        summary[f"steps {delay}"] = errors([row for row in own if row["what"] == "step"])
        collectives = [row for row in own if row["what"] == "all-reduce"]
        summary[f"all-reduces of 1 MiB {delay}"] = errors([row for row in collectives if row["nbytes"] == MIB])
        summary[f"larger all-reduces {delay}"] = errors([row for row in collectives if row["nbytes"] > MIB])
    summary["all steps"] = errors([row for row in tested if row["what"] == "step"])
    for name, values in summary.items():
        print(name, {key: float(f"{value:.3g}") for key, value in values.items()})
    summary["chosen"] = choices(rows)
    for choice in summary["chosen"]:
        print(f"{choice['lost']:+6.1%}  chosen {choice['chosen']:38s} best {choice['best']:38s} {choice['network']}")
    if args.json:
        args.json.write_text(json.dumps(summary) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
