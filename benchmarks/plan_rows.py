"""Rows of published training throughput as values: which hardware a row ran on, and what one node of it does alone.

The rows are of MLPerf Training's ResNet-50 logs, rounds v0.5 to v3.0 (github.com/mlcommons/training_results_*): images/s is the
median of the log. tests/cluster/published.csv has those that a plan can be tried on.
"""

from __future__ import annotations

import csv
import re
import statistics
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from phalanx.cluster import GB, GBIT, PRESETS, Cluster, Link

ROWS = Path(__file__).parents[1] / "tests" / "cluster" / "published.csv"
ROUNDS = ("v0.5", "v0.6", "v0.7", "v1.0", "v1.1", "v2.0", "v3.0")


@dataclass(frozen=True, slots=True)
class Row:
    """One published result."""

    round: str
    submitter: str
    system: str
    nodes: int
    per_node: int
    accelerator: str
    network: str
    batch: float  # per accelerator
    images_per_s: float

    @property
    def step(self) -> float:
        return self.batch * self.nodes * self.per_node / self.images_per_s

    @property
    def family(self) -> str:
        """The system's name without the number of nodes."""
        return re.sub(r"^\d+x?(?=[A-Z])|_n\d+|_multi", "", self.system).lower()

    @property
    def machine(self) -> str:
        """The system's name without its software either."""
        return self.family.split("_")[0]

    @property
    def device(self) -> str:
        """The accelerator without what submitters write differently: `a100 sxm 80`."""
        text = self.accelerator.lower().replace("-", " ")
        model = re.search(r"(v100s?|a100|h100|p100|a30|a40|l40|l4|a5000)", text)
        form = "pcie" if "pcie" in text else "sxm3" if "sxm3" in text else "sxm2" if "sxm2" in text else "sxm"
        memory = re.search(r"(\d+) ?gb", text)
        return (
            f"{model[1] if model else text} {form} {memory[1] if memory else '?'}{' h' if ' h' in text or '450w' in text else ''}"
        )


def read_rows(path: Path) -> list[Row]:
    """Every GPU row of the file, once: resubmissions of one log are left out."""
    found: dict[tuple[str, float], Row] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            if not (line["nodes"] and line["batch_per_acc"]) or not re.search("NVIDIA|Tesla|A100", line["accel"], re.IGNORECASE):
                continue
            row = Row(
                line["round"],
                line["submitter"],
                line["system"],
                int(line["nodes"]),
                int(line["acc_per_node"]),
                line["accel"],
                line["net"],
                float(line["batch_per_acc"]),
                float(line["imgs_per_s"]),
            )
            found.setdefault((row.system, row.images_per_s), row)
    return list(found.values())


def hardware(row: Row) -> Cluster | None:
    """The hosts of a row as its system description has them, or None where the network cards are not told."""
    known = re.match(r"dgx1|dgx2h|dgxa100|abci", row.family)
    if known:
        preset = {"dgx1": "dgx-1", "dgx2h": "dgx-2h", "dgxa100": "dgx-a100", "abci": "abci"}[known[0]]
        return PRESETS[preset].with_ranks(row.nodes * row.per_node)
    compute = row.network.split("Compute:")[-1]
    cards = re.search(r"(\d+) ?x (?:ConnectX|InfiniBand)[^,]*?(\d+) ?Gb", compute, re.IGNORECASE)
    if cards is None:
        return None
    # NVSwitch or full NVLink of A100; PCIe 3.0 x16 behind switches where there is none
    inside = Link(1e-6, 12 * GB) if "pcie" in row.device else Link(0.3e-6, 300 * GB)
    network = Link(2.6e-6, int(cards[2]) * GBIT)
    return Cluster(row.system, row.nodes, row.per_node, inside, network, ports=int(cards[1]))


def one_node(row: Row, rows: list[Row], overheads: dict[str, float]) -> Row | None:
    """The single-node result that stands for a row: of its own system and round if there is one, else of its accelerator.

    Where another round must stand in, it is the one whose software is most alike.
    """
    alone = [r for r in rows if r.nodes == 1]
    choices = (
        [r for r in alone if (r.family, r.round) == (row.family, row.round)],
        [r for r in alone if (r.machine, r.device) == (row.machine, row.device)],
        [r for r in alone if (r.device, r.round) == (row.device, row.round)],
        [r for r in alone if r.device == row.device],
    )
    for choice in choices:
        if choice:
            return min(choice, key=lambda r: (abs(overheads[r.round] - overheads[row.round]), abs(r.batch - row.batch)))
    return None


def software_overheads(rows: list[Row]) -> dict[str, float]:
    """Seconds per step that the software of each round took beyond that of the last round, from single-node rows alone.

    From one round to the next, the same device with the same batch on one node became faster by so much per step: the median over
    devices, counted where it is more than twice the scatter between systems of one round. Kernels of a device hardly change; what
    surrounds them does (launches, optimizer, input), and that is paid per step, not per image.
    """
    cells = single_node_steps(rows)
    scatter = host_spread(rows)
    overheads = {ROUNDS[-1]: 0.0}
    for earlier, later in reversed(list(pairwise(ROUNDS))):
        pairs = [
            (statistics.mean(cells[(earlier, *kind)]), statistics.mean(cells[(later, *kind)]))
            for round_, *kind in list(cells)
            if round_ == earlier and (later, *kind) in cells
        ]
        gap = statistics.median(before - after for before, after in pairs) if pairs else 0.0
        counts = pairs and gap > 2 * scatter * statistics.median(after for _, after in pairs)
        overheads[earlier] = overheads[later] + (gap if counts else 0.0)
    return overheads


def host_spread(rows: list[Row]) -> float:
    """How equal hosts differ, relative: the mean standard deviation of single-node results of one round, hardware and batch."""
    return statistics.mean(_spreads(single_node_steps(rows)))


def single_node_steps(rows: list[Row]) -> dict[tuple[str, str, int, float], list[float]]:
    """By round, device, number of devices and batch, the step times of all systems of one node."""
    cells: dict[tuple[str, str, int, float], list[float]] = defaultdict(list)
    for row in rows:
        if row.nodes == 1:
            cells[row.round, row.device, row.per_node, row.batch].append(row.step)
    return cells


def _spreads(cells: dict[tuple[str, str, int, float], list[float]]) -> list[float]:
    return [statistics.stdev(steps) / statistics.mean(steps) for steps in cells.values() if len(steps) > 1]
