"""What overlap costs, from what published runs chose: how far is each choice from the best that the model would have chosen?

    python benchmarks/plan_overlap.py [--rows FILE] [--json FILE]

The scripts of the submissions tell into how many groups gradients were divided: 16, overlapped with backward, in NVIDIA's v0.6
(MXNET_HOROVOD_NUM_GROUPS in config_DGX1_multi.sh, config_DGX2_multi.sh), one group "without NCCL and BWD overlap" since v0.7
(config_DGXA100_multi_*.sh; Dell's scripts say the same), four in Fujitsu's run (papers). People tuned these runs. So the right
price of overlap makes both choices good ones. Two numbers are tried on a grid, `steals` and `group` of the profile; a third,
`agree`, is fitted to the step times, and once more without each machine, to see how much it depends on one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks.* also when run as a script

import numpy as np
from benchmarks.plan_rows import ROWS, Row, hardware, host_spread, one_node, read_rows, software_overheads

from phalanx.cluster import MODELS, NCCL, NCCL_WITHOUT_TREES, BackendProfile, compile_schedule, from_one, run
from phalanx.cluster.hosts_differ import typical_slowness
from phalanx.cluster.step import GradientGroup, beside_backward
from phalanx.schedule import ring

MODEL = MODELS["resnet50"]
NUMBERS = (1, 2, 4, 8, 16)  # of groups
STEALS, GROUP, AGREE = (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9), (0.0, 20e-6, 50e-6, 100e-6), np.arange(0.0, 1.2e-3, 5e-5)


def groups_of(row: Row) -> int:
    """Into how many groups the run of this row divided its gradients."""
    if row.round == "v0.6":
        return 4 if row.family.startswith("abci") else 16
    return 1


def equal_groups(number: int) -> list[GradientGroup]:
    """`number` groups of about as many elements each."""
    groups, elements, done = [], 0, 0.0
    for tensor in reversed(MODEL.tensors):
        elements, done = elements + tensor.elements, done + tensor.work
        if elements >= MODEL.elements / number and len(groups) < number - 1:
            groups.append(GradientGroup(elements, done))
            elements = 0
    return [*groups, GradientGroup(elements, 1.0)]


class Case:
    """A row with everything that does not depend on the price of overlap."""

    def __init__(self, row: Row, rows: list[Row], overheads: dict[str, float], spread: float) -> None:
        cluster, node = hardware(row), one_node(row, rows, overheads)
        assert cluster is not None
        assert node is not None
        self.row = row
        compute = from_one(MODEL, node.batch, node.images_per_s / node.per_node, overhead=overheads[node.round])
        self.work = compute.seconds(row.batch) * float(typical_slowness(cluster, spread).max())
        self.forward = self.work * compute.forward
        program = compile_schedule(ring(cluster.ranks), cluster, NCCL_WITHOUT_TREES if row.round == "v0.5" else NCCL)
        self.groups = {number: equal_groups(number) for number in NUMBERS}
        self.travel = {g.elements: run(program, 2.0 * g.elements).seconds for groups in self.groups.values() for g in groups}

    def step(self, profile: BackendProfile, number: int) -> float:
        """Seconds with `number` groups."""

        def send(group: GradientGroup, begin: float) -> float:
            return begin + self.travel[group.elements]

        came, computed = beside_backward(profile, self.groups[number], self.forward, self.work, send)
        return float(max(came, computed)) + profile.agree


def cases(rows: list[Row]) -> list[Case]:
    overheads, spread = software_overheads(rows), host_spread(rows)
    several = [row for row in rows if row.nodes > 1 and hardware(row) and one_node(row, rows, overheads)]
    return [Case(row, rows, overheads, spread) for row in several]


def misses(found: list[Case], profile: BackendProfile) -> np.ndarray:
    """By row, the logarithm of published over predicted, with the groups of the row."""
    return np.array([np.log(case.row.step / case.step(profile, groups_of(case.row))) for case in found])


def grid(found: list[Case]) -> Iterator[dict[str, Any]]:
    """By price of overlap: how much slower than the best the chosen numbers of groups come out, on average."""
    for steals in STEALS:
        for group in GROUP:
            profile = replace(NCCL, steals=steals, group=group)
            lost: dict[str, list[float]] = {"one group": [], "16 groups": []}
            best = []
            for case in found:
                times = {number: case.step(profile, number) for number in NUMBERS}
                best.append(case.row.step / min(times.values()) - 1)
                chosen = groups_of(case.row)
                if case.row.round != "v0.5" and chosen in (1, 16):  # v0.5's scripts do not say
                    lost["one group" if chosen == 1 else "16 groups"].append(times[chosen] / min(times.values()) - 1)
            yield {
                "steals": steals,
                "group_s": group,
                "lost_by_choosing": {name: float(np.mean(values)) for name, values in lost.items()},
                "larger_loss": max(float(np.mean(values)) for values in lost.values()),
                "error_with_best_groups": float(np.mean(np.abs(best))),
                "bias_with_best_groups": float(np.mean(best)),
            }


def fit_agree(found: list[Case]) -> float:
    return float(min(AGREE, key=lambda agree: (misses(found, replace(NCCL, agree=float(agree))) ** 2).sum()))


def without_each(found: list[Case]) -> Iterator[dict[str, Any]]:
    """Leave a machine out, fit, predict it."""
    for machine in sorted({case.row.machine for case in found}):
        agree = fit_agree([case for case in found if case.row.machine != machine])
        errors = misses([case for case in found if case.row.machine == machine], replace(NCCL, agree=agree))
        yield {"left_out": machine, "agree_s": agree, "errors": [float(np.expm1(error)) for error in errors]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = cases(read_rows(args.rows))
    prices = list(grid(found))
    for row in prices:
        one, many = row["lost_by_choosing"]["one group"], row["lost_by_choosing"]["16 groups"]
        print(
            f"steals {row['steals']:.1f}, {row['group_s'] * 1e6:3.0f} us a group: one group loses {one:.1%}, 16 lose {many:.1%};"
            f" error with the best groups {row['error_with_best_groups']:.1%}, bias {row['bias_with_best_groups']:+.1%}"
        )
    least = min(prices, key=lambda row: row["larger_loss"])
    left_out = list(without_each(found))
    errors = np.array([error for row in left_out for error in row["errors"]])
    for row in left_out:
        print(f"without {row['left_out']:30s} agree {row['agree_s'] * 1e6:.0f} us")
    summary = {
        "fairest_price": {name: least[name] for name in ("steals", "group_s", "larger_loss")},
        "agree_s": fit_agree(found),
        "left_out_mean_abs_error": float(np.abs(errors).mean()),
        "left_out_bias": float(errors.mean()),
        "rows": len(found),
    }
    print(summary)
    if args.json:
        head = {"config": {"verb": "plan_overlap"}, "date": time.strftime("%Y-%m-%d")}
        lines = [head, *prices, *left_out, {"summary": summary}]
        args.json.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
