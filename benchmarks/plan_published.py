"""The planner against published clusters: predicted beside measured, row by row, and the figures of four papers.

    python benchmarks/plan_published.py [--rows FILE] [--json FILE] [--papers-json FILE]

Inputs of a prediction: the throughput of one node of the same system, and the hardware sheet. Nothing is fitted on rows of
several nodes but the price of overlap (plan_overlap.py). What does not come from the row itself comes from single-node rows: how
much the software of a round took per step beyond that of later rounds, and how much equal hosts differ (plan_rows.py). NCCL had
no trees before 2.4 (round v0.5).

Every row is predicted twice: as it was run, in one group except where its scripts say 16 (plan_overlap.py), and as `phalanx plan`
would recommend it. The structure of the model was chosen with these rows in sight.

`two_points` is another question: if a family's one node and its next larger size are known, how well are the others predicted?
What the second takes beyond the prediction is added to every step, whatever its batch.

Two weak baselines scale the node's step by the batch: `bytes over bandwidth` (Paleo: no latency) and `no overlap` (the library's
price of the all-reduce after it). A strong one, no overlap with our computing time, shows what the rest of the model adds to that
time: little, because one group of all gradients cannot leave before backward ends.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks.* also when run as a script

import numpy as np
from benchmarks.plan_overlap import groups_of
from benchmarks.plan_papers import papers
from benchmarks.plan_rows import ROUNDS, ROWS, Row, hardware, host_spread, one_node, read_rows, software_overheads

from phalanx.cluster import MODELS, NCCL, NCCL_WITHOUT_TREES, StepPlan, compile_schedule, from_one, predict_step, simulate
from phalanx.cluster.hosts_differ import typical_slowness
from phalanx.cluster.question import ALL_REDUCES, Question, uncertainty
from phalanx.cluster.screen import rank_candidates
from phalanx.cluster.table import describe
from phalanx.schedule import ring

MODEL = MODELS["resnet50"]
FUSED = StepPlan(group_bytes=2 * 64e6, wire=2)  # bytes of float32; 64 MB as they travel
SIXTEEN = StepPlan(group_bytes=4.0 * MODEL.elements / 16, wire=2)
GRADIENT = 2.0 * MODEL.elements  # bytes on the wire


def predict_rows(
    rows: list[Row], plan: StepPlan | None = None, *, equal_hosts: bool = False, equal_software: bool = False
) -> Iterator[dict[str, Any]]:
    overheads = software_overheads(rows) if not equal_software else dict.fromkeys(ROUNDS, 0.0)
    spread = host_spread(rows) if not equal_hosts else 0.0
    for row in rows:
        cluster = hardware(row) if row.nodes > 1 else None
        node = one_node(row, rows, overheads) if cluster else None
        if cluster is None or node is None:
            continue
        profile = NCCL_WITHOUT_TREES if row.round == "v0.5" else NCCL
        rate = node.images_per_s / (node.nodes * node.per_node)
        compute = from_one(MODEL, node.batch, rate, overhead=overheads[node.round])
        schedule = ring(cluster.ranks)
        program = compile_schedule(schedule, cluster, profile)
        slowness = typical_slowness(cluster, spread)
        used = plan or (SIXTEEN if groups_of(row) == 16 else FUSED)
        step = predict_step(program, MODEL, compute, row.batch, used, slowness=slowness).seconds
        linear = row.batch / rate
        paleo = linear + 2 * GRADIENT / (cluster.ports * cluster.network.bandwidth)
        travel = simulate(schedule, cluster, GRADIENT, profile=profile).seconds
        yield {
            "round": row.round,
            "system": row.system,
            "family": row.family,
            "nodes": row.nodes,
            "accelerators": cluster.ranks,
            "batch": row.batch,
            "one_node": f"{node.round} {node.system} batch {node.batch:g}: {node.images_per_s:.0f} images/s",
            "published": row.images_per_s,
            "predicted": row.batch * cluster.ranks / step,
            "error": row.step / step - 1,
            "error_bytes_over_bandwidth": row.step / paleo - 1,
            "error_no_overlap": row.step / (linear + travel) - 1,
            "error_no_overlap_our_computing_time": row.step / (compute.seconds(row.batch) + travel) - 1,
        }


def recommended(rows: list[Row], families: tuple[str, ...] = ALL_REDUCES) -> list[dict[str, Any]]:
    """Every row as `phalanx plan` would have it: the best algorithm and groups, and the uncertainty that is printed beside it."""
    overheads, spread = software_overheads(rows), host_spread(rows)
    found = []
    for row in rows:
        cluster = hardware(row) if row.nodes > 1 else None
        node = one_node(row, rows, overheads) if cluster else None
        if cluster is None or node is None:
            continue
        compute = from_one(MODEL, node.batch, node.images_per_s / node.per_node, overhead=overheads[node.round])
        profile = NCCL_WITHOUT_TREES if row.round == "v0.5" else NCCL
        question = Question(
            cluster, MODEL, compute, profile, row.batch * cluster.ranks, wires=(2,), families=families, host_spread=spread
        )
        candidates = rank_candidates(question)
        error = uncertainty(question, candidates[0])
        step = candidates[0].seconds
        found.append(
            {
                "recommended": f"{row.round} {row.system}",
                "how": describe(candidates[0], profile, MODEL.elements),
                "error": row.step / step - 1,
                "uncertainty": error,
                "held": abs(step / row.step - 1) <= error,
            }
        )
    return found


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    def column(name: str) -> np.ndarray:
        return np.abs([row[name] for row in rows])

    ours, paleo, serial = column("error"), column("error_bytes_over_bandwidth"), column("error_no_overlap")
    strong = column("error_no_overlap_our_computing_time")
    return {
        "rows": len(rows),
        "mean_abs_error": float(ours.mean()),
        "worst": float(ours.max()),
        "bias": statistics.mean(row["error"] for row in rows),
        "bytes_over_bandwidth": {"mean_abs_error": float(paleo.mean()), "worst": float(paleo.max())},
        "no_overlap": {"mean_abs_error": float(serial.mean()), "worst": float(serial.max())},
        "no_overlap_our_computing_time": {"mean_abs_error": float(strong.mean()), "worst": float(strong.max())},
    }


def two_points(predicted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By family of at least three sizes, the larger ones with what the smallest of several nodes took beyond its prediction."""
    families: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in predicted:
        families.setdefault((row["round"], row["family"]), []).append(row)
    corrected = []
    for (round_, family), rows in families.items():
        known, *unknown = sorted(rows, key=lambda row: row["nodes"])
        beyond = _step(known, "published") - _step(known, "predicted")
        for row in unknown:
            error = _step(row, "published") / (_step(row, "predicted") + beyond) - 1
            names = {"round": round_, "family": family, "known_nodes": [1, known["nodes"]], "nodes": row["nodes"]}
            corrected.append({"two_points": names, "beyond_s": beyond, "error_one_point": row["error"], "error": error})
    return corrected


def _step(row: dict[str, Any], which: str) -> float:
    return float(row["batch"] * row["accelerators"] / row[which])


def ablations(rows: list[Row]) -> dict[str, dict[str, float]]:
    """What each assumption is worth: the errors without it."""
    without = {
        "all rows in one group": predict_rows(rows, FUSED),
        "all rows in groups of 25 MB, overlapped": predict_rows(rows, StepPlan(wire=2)),
        "hosts that do not differ": predict_rows(rows, equal_hosts=True),
        "software of all rounds alike": predict_rows(rows, equal_software=True),
    }
    totals = {name: summary(list(predicted)) for name, predicted in without.items()}
    return {name: {key: total[key] for key in ("mean_abs_error", "worst", "bias")} for name, total in totals.items()}


def show(
    rows: list[dict[str, Any]],
    total: dict[str, Any],
    twice: list[dict[str, Any]],
    four: list[dict[str, Any]],
    less: dict[str, dict[str, float]],
) -> None:
    print("system                                  nodes batch  published  predicted   error bytes/bw  serial")
    for row in rows:
        print(
            f"{row['round'] + ' ' + row['system'][:33]:38s} {row['nodes']:6d} {row['batch']:5g} {row['published']:10,.0f}"
            f" {row['predicted']:10,.0f} {row['error']:+7.1%} {row['error_bytes_over_bandwidth']:+8.1%}"
            f" {row['error_no_overlap']:+7.1%}"
        )
    print(
        f"mean absolute error {total['mean_abs_error']:.1%}, worst {total['worst']:.1%}, bias {total['bias']:+.1%};"
        f" bytes over bandwidth {total['bytes_over_bandwidth']['mean_abs_error']:.1%},"
        f" no overlap {total['no_overlap']['mean_abs_error']:.1%}, with our computing time"
        f" {total['no_overlap_our_computing_time']['mean_abs_error']:.1%} ({total['rows']} rows)"
    )
    for name, errors in less.items():
        print(
            f"  instead with {name}: mean {errors['mean_abs_error']:.1%}, worst {errors['worst']:.1%}, bias {errors['bias']:+.1%}"
        )
    print("two points per family                  nodes   from one  from two")
    for row in twice:
        names = row["two_points"]
        name = f"{names['round']} {names['family'][:28]}"
        print(f"{name:38s} {names['nodes']:6d} {row['error_one_point']:+9.1%} {row['error']:+9.1%}")
    errors = np.abs([row["error"] for row in twice])
    print(
        f"mean absolute error {errors.mean():.1%}, median {np.median(errors):.1%}, worst {errors.max():.1%} ({errors.size} rows)"
    )
    for row in four:
        print(f"{row['paper']:12s} {row['what']:48s} {row['published']:12,.4g} {row['predicted']:12,.4g} {row['error']:+7.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--papers-json", type=Path)
    args = parser.parse_args()
    all_rows = read_rows(args.rows)
    rows = list(predict_rows(all_rows))
    total, four = summary(rows), list(papers(host_spread(all_rows), software_overheads(all_rows)))
    twice, less = two_points(rows), ablations(all_rows)
    show(rows, total, twice, four, less)
    best = recommended(all_rows)
    errors = np.array([row["error"] for row in best])
    for row in best:
        print(f"{row['recommended'][:38]:38s} {row['error']:+7.1%} +-{row['uncertainty']:.1%} {row['how']}")
    as_recommended = {
        "rows": len(best),
        "mean_abs_error": float(np.abs(errors).mean()),
        "worst": float(np.abs(errors).max()),
        "bias": float(errors.mean()),
        "held": sum(row["held"] for row in best),
    }
    print("as recommended:", as_recommended)
    head = {
        "config": {"verb": "plan_published", "rows": args.rows.name},
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "host_spread": host_spread(all_rows),
        "software_overheads_s": software_overheads(all_rows),
    }
    if args.json:
        _write(args.json, [head, *rows, {"summary": total}, *twice, {"ablations": less}, *best, {"recommended": as_recommended}])
    if args.papers_json:
        _write(args.papers_json, [{**head, "config": {"verb": "plan_papers"}}, *four])


def _write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
