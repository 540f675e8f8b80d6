"""The page of results, from benchmarks/results/: `make results`. What misses its bar is marked."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from records import find, measured, over_gloo, rows

KIB, MIB = 1 << 10, 1 << 20

HEAD = """# Results

<!-- Generated from benchmarks/results/ by `make results`. Measure again, or change docs/generate/results.py; not this page. -->

Each row has the bar we set before we measured. **Missed** marks a result that does not reach its bar; we keep those. Every number
comes from a program in `benchmarks/` or from `phalanx bench`, which writes its rows to `benchmarks/results/`.

The machines have 2 cores and no GPU: an Intel Xeon with AVX-512 for the rows of 2026-11-16 and 2026-11-18, an AMD EPYC with AVX2
for those of 2026-11-17, and one with AVX-512 for those of 2026-11-19 and 20. Linux 6.18, Python 3.11, torch 2.13.0. Contenders
run side by side in one run, in turns. Numbers are medians unless a row says otherwise. Ranks beyond 2 share the cores. "The lab"
is a set of [emulated hosts](lab.md): network namespaces on this machine, joined by links of a given rate and delay.

![Step time against DDP, and all-reduce against gloo](images/results.svg)
"""

TAIL = """## Kept by tests

Tests assert these bars, so they have no row above: `import phalanx` takes less than 0.3 s beyond `import torch`, and
`phalanx verify torus:64x64` takes less than 7 s of processor time.
"""


@dataclass(frozen=True)
class Result:
    """One sentence, its number, and the bar."""

    what: str
    measured: str
    bar: str
    met: bool
    record: str

    def row(self) -> str:
        mark = "" if self.met else "**missed**"
        return f"| {self.what} | {self.measured} | {self.bar} | {mark} | {measured(self.record)} |"


def least(what: str, value: float, bar: float, record: str, form: str = "{:.3g}x") -> Result:
    """More is better."""
    return Result(what, form.format(value), "at least " + form.format(bar), value >= bar, record)


def most(what: str, value: float, bar: float, record: str, form: str = "{:.3g}x") -> Result:
    """Less is better."""
    return Result(what, form.format(value), "at most " + form.format(bar), value <= bar, record)


# ---- topics --------------------------------------------------------------------------------------------------------------------


def one_host() -> list[Result]:
    """Ranks that share a machine."""
    found = []
    for ranks in (2, 4):
        found += _steps(ranks)
        adamw = f"train_{ranks}_ranks_adamw"
        times = find(adamw, contender="phalanx fused")["times_ddp"]
        what = f"ResNet-50 step with AdamW, batch 2, {ranks} ranks, `AllReduce(fused=True)`: speed-up over DDP on gloo"
        found.append(least(what, times, 1.4, adamw))
    for contender, said in (("phalanx", "default"), ("phalanx fused", "`AllReduce(fused=True)`")):
        times = find("train_gpt_2_ranks_adamw", contender=contender)["times_ddp"]
        what = f"Step of gpt-tiny (820,352 parameters, 4 texts of 64 characters per rank, AdamW) on 2 ranks, {said}: over DDP"
        found.append(least(what, times, 1.2, "train_gpt_2_ranks_adamw"))
    bars = {2: {4 * KIB: 50, MIB: 25, 4 * MIB: 15, 64 * MIB: 7}, 4: {4 * KIB: 100, MIB: 30, 4 * MIB: 12, 64 * MIB: 7}}
    for ranks, sizes in bars.items():
        record = f"allreduce_{ranks}_ranks"
        for size, bar in sizes.items():
            times = find(record, contender="phalanx buffer", size=size)["times_gloo"]
            what = f"All-reduce of a {_size(size)} `comm.buffer` on {ranks} ranks: speed-up over gloo"
            found.append(least(what, times, bar, record))
        times = min(
            row["times_gloo"] for row in rows(record) if row.get("contender") == "phalanx tensor" and row["size"] >= 64 * KIB
        )
        what = f"All-reduce of any tensor, 64 KiB to 64 MiB, on {ranks} ranks: least speed-up over gloo"
        found.append(least(what, times, 4, record))
    wire = find("bytes_on_the_wire", algorithm="torus(2x2)", form="moves")["ratio"]
    found.append(most("Bytes on the wire of torus 2x2 on gloo, counted / predicted", wire, 1.05, "bytes_on_the_wire", "{:.4f}"))
    return found


def _steps(ranks: int) -> list[Result]:
    """The multi-node optimizer against DDP, and what no communication at all would gain."""
    found, record = [], f"steps_{ranks}_ranks"
    for batch in (2, 4):
        at = {name: find(record, model="resnet50", batch=batch, contender=name) for name in ("none", "optimizer", "fused")}
        for name, said, bar in (("optimizer", "default", 1.25), ("fused", "`AllReduce(fused=True)`", 1.4)):
            what = f"ResNet-50 step (64 px, batch {batch} per rank), {ranks} ranks, {said}: speed-up over DDP on gloo"
            limit = f"(no communication: {over_gloo(at['none']):.3g}x)"
            found.append(least(f"{what} {limit}", over_gloo(at[name]), bar, record))
            if "times_views" in at[name]:
                views = f"{what} with bucket views and a static graph"
                found.append(least(views, at[name]["times_views"], bar, record))
        what = f"ResNet-50 step, batch {batch}, {ranks} ranks, default: time over no communication, as a share of DDP's"
        found.append(most(what, at["optimizer"]["cost"], 0.25, record, "{:.2f}"))
    return found


CONTENDERS = ("no-op", "phalanx")


def one_word() -> list[Result]:
    """DDP with `phalanx` where `gloo` was, and what people use instead of DDP."""
    found = []
    for ranks, record in ((2, "steps_by_name_2_ranks"), (4, "steps_4_ranks")):
        for batch in (2, 4):
            at = {name: find(record, model="resnet50", batch=batch, contender=name) for name in CONTENDERS}
            limit = f"(a hook that does nothing: {over_gloo(at['no-op']):.3g}x)"
            what = f"ResNet-50 step (64 px, batch {batch} per rank), {ranks} ranks, DDP with the backend's name changed {limit}"
            found.append(least(what, over_gloo(at["phalanx"]), 1.2, record))
    record = "steps_2_ranks"
    changed = over_gloo(find(record, model="gpt", contender="phalanx"))
    found.append(
        least("Step of gpt (0.8 M parameters, batch 2) on 2 ranks, DDP with the backend's name changed", changed, 1.2, record)
    )
    for model in ("gpt", "nanogpt", "cnn", "mlp"):
        cost = find(record, model=model, contender="optimizer")["cost"]
        what = f"Step of {model} on 2 ranks, multi-node optimizer: time over no communication, as a share of DDP's"
        found.append(most(what, cost, 0.25, record, "{:.2f}"))
    for framework, said in (("lightning", "Lightning"), ("accelerate", "accelerate"), ("transformers", "HF Trainer")):
        ours, gloo = (find("frameworks", framework=framework, contender=each) for each in ("phalanx", "gloo"))
        what = f"{said}, one word changed, 2 ranks: over gloo, ratio of medians (turn by turn {ours['times_as_fast']:.3g}x)"
        found.append(least(what, gloo["ms"] / ours["ms"], 1.1, "frameworks"))
    for ranks in (2, 4):
        for size in (64 * KIB, MIB, 25 * MIB):
            core = _all_reduce(ranks, size, "comm")
            for contender, way in (("phalanx group", "the backend's group"), ("phalanx", "`dist.all_reduce` on the backend")):
                what = f"All-reduce of {_size(size)} by {way} on {ranks} ranks: time over that of `comm.all_reduce`"
                found.append(most(what, _all_reduce(ranks, size, contender) / core, 1.3, "backend"))
    changed = find("backend_lab_4x2_1gbit", model="resnet50", contender="phalanx")["times_gloo"]
    what = "Step of ResNet-50 on 4 hosts of 2 ranks at 1 Gbit/s in the lab, DDP with the backend's name changed: over gloo"
    found.append(least(what, changed, 1.0, "backend_lab_4x2_1gbit"))
    return found


def _all_reduce(ranks: int, size: int, contender: str) -> float:
    """Microseconds in the newest run with this many ranks."""
    found, now = 0.0, 0
    for row in rows("backend"):
        now = row["ranks"] if row["kind"] == "run" else now
        if (now, row.get("bytes"), row.get("contender")) == (ranks, size, contender):
            found = row["us"]
    return found


def _wires() -> list[Result]:
    """What compressed gradients and local steps save, and cost."""
    found = []
    for rate, said, bar in (("300mbit", "300 Mbit/s", 3), ("1gbit", "1 Gbit/s", 1.8)):
        record = f"lab_wires_4x2_{rate}"
        contenders = ("DDP", "DDP PowerSGD", "phalanx int8", "phalanx PowerSGD")
        step = {name: find(record, contender=name)["step_ms"] for name in contenders}
        what = f"Step of ResNet-50 at {said}, `Int8()`: speed-up over DDP"
        found.append(least(what, step["DDP"] / step["phalanx int8"], bar, record))
        what = f"Step of ResNet-50 at {said}, `PowerSGD(rank=4)`: speed-up over DDP's own PowerSGD hook, rank 4"
        found.append(least(what, step["DDP PowerSGD"] / step["phalanx PowerSGD"], 1.3, record))
    for rounding in ("nearest", "stochastic"):
        speed = find("codes_speed", block=256, rounding=rounding)["gb_per_s"]
        what = f"`Int8()`, {rounding} rounding: encode, add and decode on one core"
        found.append(least(what, speed, 2, "codes_speed", "{:.1f} GB/s"))
    theirs = max(row["gb_per_s"] for row in rows("codes_speed") if "hivemind" in row.get("code", ""))
    what = "The same with nearest rounding: speed-up over the fastest of hivemind's three 8-bit codes"
    found.append(least(what, find("codes_speed", block=256, rounding="nearest")["gb_per_s"] / theirs, 1, "codes_speed"))
    for contender in ("LocalSGD", "DiLoCo", "DiLoCo, 4 parts, overlapped"):
        times = find("local_steps_peers", contender=f"phalanx {contender}")["times_torchft"]
        what = f"{contender}, every 20 steps, 101 MB, 4 hosts at 300 Mbit/s: speed-up of a step over torchft 0.2"
        found.append(least(what, times, 1, "local_steps_peers"))
    for wire, said, bar in (("int8", "`Int8()`", 0.27), ("powersgd", "`PowerSGD(rank=4)`", 0.03)):
        row = find("bytes_of_wires", wire=wire)
        what = f"ResNet-50 step, {said}: bytes that leave a host, as a share of float32's"
        found.append(most(what, row["of_float32"], bar, "bytes_of_wires", "{:.4f}"))
        what = f"ResNet-50 step, {said}: bytes counted by the network interface, without its headers / predicted by the schedule"
        found.append(most(what, row["ratio"], 1.01, "bytes_of_wires", "{:.4f}"))
    whole = max(find("bytes_local_steps", contender="all-reduce")["counted"])
    for contender in ("LocalSGD, H=50", "DiLoCo, H=50"):
        row, said = find("bytes_local_steps", contender=contender), contender.replace(", H=50", "(every=50)")
        what = f"`{said}`: bytes of an all-reduce in every step / bytes that leave a host"
        found.append(least(what, whole / max(row["counted"]), 45, "bytes_local_steps", "{:.1f}"))
        what = f"`{said}`: bytes counted by the network interface, without its headers / predicted by the schedule"
        found.append(most(what, max(row["ratio"]), 1.01, "bytes_local_steps", "{:.4f}"))
    return found


def several_hosts() -> list[Result]:
    """4 hosts of 2 ranks in the lab."""
    allreduce, delayed = "lab_allreduce_4x2_1gbit", "lab_allreduce_4x2_1gbit_5ms"
    small, large = (find(allreduce, contender="phalanx buffer", size=size) for size in (64 * KIB, 16 * MIB))
    late = find(delayed, contender="phalanx buffer", size=64 * KIB)["times_gloo"]
    wire = 2 * 3 / 4 * 16 * MIB / 125e6 * 1e6  # what leaves each of 4 hosts, at 1 Gbit/s, in microseconds
    ratio = max(max(row["ratio"]) for row in rows("bytes_between_hosts") if "ratio" in row)
    plain = find("lab_train_4x2_1gbit", contender="phalanx")["times_ddp"]
    slow = find("lab_train_4x2_300mbit", contender="phalanx bfloat16")["times_ddp"]
    return [
        least("All-reduce of 64 KiB at 1 Gbit/s: speed-up over gloo", small["times_gloo"], 2.5, allreduce),
        least("All-reduce of 64 KiB at 1 Gbit/s and 5 ms delay: speed-up over gloo", late, 2, delayed),
        most("All-reduce of 16 MiB at 1 Gbit/s: time over what the wire allows", large["time_us"] / wire, 1.2, allreduce),
        most("Automatic choice against the best algorithm, 64 KiB to 16 MiB", _worst_choice(allreduce), 1.05, allreduce),
        most("Bytes that leave each host, counted / predicted", ratio, 1.03, "bytes_between_hosts", "{:.4f}"),
        least("Step of ResNet-50 at 1 Gbit/s: speed-up over DDP", plain, 1, "lab_train_4x2_1gbit"),
        least("Step of ResNet-50 at 300 Mbit/s, bfloat16 on the wire: speed-up over DDP", slow, 1.7, "lab_train_4x2_300mbit"),
        *_wires(),
    ]


def _worst_choice(record: str) -> float:
    named = [row for row in rows(record) if str(row.get("contender", "")).startswith("phalanx ")]
    best: dict[int, float] = {}
    for row in named:
        best[row["size"]] = min(best.get(row["size"], row["time_us"]), row["time_us"])
    own: dict[int, float] = {}
    for row in named:
        if row["contender"] in ("phalanx buffer", "phalanx tensor"):
            own[row["size"]] = min(own.get(row["size"], row["time_us"]), row["time_us"])
    return max(own[size] / best[size] for size in own)


def planning() -> list[Result]:
    """What `phalanx plan` predicts."""
    errors = [abs(row["error"]) for row in rows("plan_published") if "published" in row]
    papers = [abs(row["error"]) for row in rows("plan_papers") if "paper" in row]
    best = next(row["recommended"] for row in rows("plan_published") if isinstance(row.get("recommended"), dict))
    lab = rows("plan_lab_check")[0]
    lost = [choice["lost"] for choice in lab["chosen"]]
    near = sum(choice <= 0.05 for choice in lost) / len(lost)
    form, record = "{:.1%}", "plan_published"
    return [
        most(
            f"Throughput of {len(errors)} published clusters of 8 to 4,320 GPUs: mean error",
            statistics.mean(errors),
            0.1,
            record,
            form,
        ),
        most("Throughput of published clusters: worst error", max(errors), 0.2, record, form),
        most(
            "Throughput of published clusters, as `phalanx plan` recommends: mean error",
            best["mean_abs_error"],
            0.1,
            record,
            form,
        ),
        most("Throughput of published clusters, as `phalanx plan` recommends: bias", abs(best["bias"]), 0.05, record, form),
        least("Published clusters for which the printed uncertainty holds", best["held"] / best["rows"], 0.8, record, "{:.0%}"),
        most("Figures of five papers: worst error", max(papers), 0.1, "plan_papers", form),
        most(
            f"{lab['all steps']['rows']} training steps in the lab: median error",
            lab["all steps"]["median"],
            0.03,
            "plan_lab",
            form,
        ),
        most("Training steps in the lab: 95th percentile of the error", lab["all steps"]["p95"], 0.10, "plan_lab", form),
        least("Networks on which the chosen step is within 5 % of the best one", near, 0.95, "plan_lab", "{:.0%}"),
    ]


def gossip() -> list[Result]:
    """Speed, bytes, accuracy, and a rank that dies."""
    ends = [row for row in rows("gossip_speed") if row.get("contender") in ("gossip", "all-reduce")]
    two, sixteen = (row["efficiency"] for row in (ends[1], ends[-1]))
    bytes_ = max(row["ratio"] for row in rows("gossip_cost") if str(row.get("contender")).startswith("gossip"))
    died = find("gossip_death", killed=0)
    undisturbed = find("gossip_death", killed=None)
    points = "{:+.2f} points"
    return [
        least("Efficiency on 2 hosts in the lab, computation emulated", two, 0.95, "gossip_speed", "{:.0%}"),
        least(
            f"Efficiency on 16 hosts in the lab, computation emulated (all-reduce: {ends[-2]['efficiency']:.0%})",
            sixteen,
            0.95,
            "gossip_speed",
            "{:.0%}",
        ),
        most("Bytes per rank and step over what is exchanged, 2 to 16 ranks", bytes_, 1.01, "gossip_cost", "{:.4f}"),
        least(
            "Accuracy against all-reduce: Fashion-MNIST, 8 ranks, 4 epochs, 3 seeds",
            _points("fashion-mnist", 4),
            -0.5,
            "study_gossip",
            points,
        ),
        least(
            "Accuracy against all-reduce: CIFAR-10, 8 ranks, 10 epochs, 3 seeds",
            _points("cifar10", 10),
            -0.5,
            "study_gossip",
            points,
        ),
        most(
            "`kill -9` on one of 8 ranks: longest gap between steps of the others",
            died["longest_gap_s"],
            2,
            "gossip_death",
            "{:.2f} s",
        ),
        least(
            "`kill -9` on one of 8 ranks: accuracy against the undisturbed run",
            100 * (died["accuracy"] - undisturbed["accuracy"]),
            -1,
            "gossip_death",
            points,
        ),
    ]


def _points(data: str, epochs: int) -> float:
    def mean(variant: str) -> float:
        same = [row for row in rows("study_gossip") if (row["data"], row["epochs"], row["variant"]) == (data, epochs, variant)]
        return statistics.mean(row["accuracy"] for row in same)

    return 100 * (mean("gossip") - mean("all-reduce"))


def slow_networks() -> list[Result]:
    """What sending less costs in accuracy."""
    started = "DiLoCo, H=20, outer 1/0.7, after 200 steps"
    wanted = (
        ("cifar10", 10, "Int8", "`Int8()`", -0.1),
        ("fashion-mnist", 4, "Int8", "`Int8()`", -0.1),
        ("cifar10", 10, "PowerSGD, rank 4", "`PowerSGD(rank=4)`", -0.5),
        ("fashion-mnist", 4, "PowerSGD, rank 4", "`PowerSGD(rank=4)`", -0.5),
        ("cifar10", 10, "DiLoCo, H=20", "`DiLoCo(every=20)`", -0.5),
        ("cifar10", 10, started, "`DiLoCo(every=20, start=200)`, outer rate 1, momentum 0.7", -0.5),
        ("fashion-mnist", 4, started, "`DiLoCo(every=20, start=200)`, outer rate 1, momentum 0.7", -0.5),
    )
    found = []
    for data, epochs, variant, said, bar in wanted:
        points, seeds = _against_all_reduce(data, epochs, variant)
        name = {"cifar10": "CIFAR-10", "fashion-mnist": "Fashion-MNIST"}[data]
        what = f"Accuracy against all-reduce: {said}, {name}, 8 ranks, {epochs} epochs, seeds: {seeds}"
        found.append(least(what, points, bar, "study_slow_networks", "{:+.2f} points"))
    for data, said in (("cifar10", "CIFAR-10"), ("fashion-mnist", "Fashion-MNIST")):
        points, seeds = _exact_against_dissemination(data)
        what = f'Accuracy of `Gossip(topology="exact")` against dissemination, {said}, 6 ranks, seeds: {seeds}'
        found.append(least(what, points, 0, "study_slow_networks_6_ranks", "{:+.2f} points"))
    return found


def _exact_against_dissemination(data: str) -> tuple[float, int]:
    """The same on 6 ranks, where the two differ."""
    own = [row for row in rows("study_slow_networks_6_ranks") if row["data"] == data]
    exact, plain = (
        {row["seed"]: row["accuracy"] for row in own if row["variant"] == name} for name in ("gossip, exact", "gossip")
    )
    both = exact.keys() & plain.keys()
    return 100 * statistics.mean(exact[seed] - plain[seed] for seed in both), len(both)


def _against_all_reduce(data: str, epochs: int, variant: str) -> tuple[float, int]:
    """The mean difference in percentage points, of runs with the same seed, and how many seeds there are."""

    def of(variant: str) -> dict[int, float]:
        studies = [*rows("study_slow_networks"), *rows("study_gossip")]  # the last has all-reduce with all seeds
        same = [row for row in studies if (row["data"], row["epochs"], row["variant"]) == (data, epochs, variant)]
        return {row["seed"]: row["accuracy"] for row in same if row["ranks"] == 8}

    own, judge = of(variant), of("all-reduce")
    both = own.keys() & judge.keys()
    return 100 * statistics.mean(own[seed] - judge[seed] for seed in both), len(both)


def large_batches() -> list[Result]:
    """LARS, and the accuracy that a batch of 8,192 costs."""
    alone = find("lars_step", setting="alone", contender="phalanx.Lars")
    fused = find("lars_step", setting="2 ranks, a core each", contender="phalanx.Lars in one")
    found = [
        least(
            "LARS step on ResNet-50, one thread: speed-up over norms layer by layer",
            alone["times_faster_than_per_layer"],
            2,
            "lars_step",
        ),
        least(
            "LARS step with `AllReduce(fused=True)` on 2 ranks: speed-up over norms layer by layer",
            fused["times_faster_than_per_layer"],
            3,
            "lars_step",
        ),
        most(
            "LARS step with `AllReduce(fused=True)` on 2 ranks: time over that of torch's fused SGD",
            fused["times_sgd_fused"],
            1.25,
            "lars_step",
        ),
    ]
    for data, said in (("fashion-mnist", "Fashion-MNIST, 24 epochs"), ("cifar10", "CIFAR-10, 30 epochs")):
        lost, plain = _lost(data)
        what = f"Batch 8,192 against the best of batch 128: {said}, 3 seeds, lost accuracy (plain SGD: {plain:.2f})"
        found.append(most(what, lost, 1.0, "study_large_batch", "{:.2f} points"))
    return found


def _lost(data: str) -> tuple[float, float]:
    """Points that the full recipe, and plain SGD, lose at the largest batch against the best at the smallest."""
    means: dict[tuple[int, str], list[float]] = {}
    for row in rows("study_large_batch"):
        if row.get("data") == data and row["purpose"] == "grid":
            means.setdefault((row["batch"], row["method"]), []).append(row["accuracy"])
    best = max(statistics.mean(found) for (batch, _), found in means.items() if batch == 128)
    full, plain = (statistics.mean(means[8192, method]) for method in ("+ batch-size control", "SGD, linear rule"))
    return 100 * (best - full), 100 * (best - plain)


def runs() -> list[Result]:
    """Killed runs, a recipe, and the pipeline of images."""
    kills = find("kill_and_resume", kind="summary")
    end = find("recipe_cifar10", kind="end")
    photographs = [
        least(
            f"Photographs to batches, {workers} worker(s): images/s over Pillow + DataLoader, worse of two sizes",
            min(
                row["times_pillow"]
                for row in rows("jpeg_pipeline")
                if row.get("contender") == "phalanx" and row["workers"] == workers
            ),
            2,
            "jpeg_pipeline",
        )
        for workers in (1, 2)
    ]
    what = "Runs killed with `kill -9` and resumed that end with the bits of the undisturbed run"
    return [
        Result(
            what,
            f"{kills['resumed_and_equal']} of {kills['kills']}",
            "all",
            kills["kills"] == kills["resumed_and_equal"],
            "kill_and_resume",
        ),
        least(
            "`phalanx train cifar10` (ResNet-9, 20 epochs, 2 ranks): test accuracy", end["top1"], 0.9, "recipe_cifar10", "{:.2%}"
        ),
        most("`phalanx train cifar10`: time", end["seconds"] / 60, 40, "recipe_cifar10", "{:.0f} min"),
        *photographs,
    ]


def deaths() -> list[Result]:
    """Ranks, hosts and links that fail under an elastic job on 4 hosts."""
    kills = [row["seconds_to_next_step"] for row in rows("elastic_faults") if row["kind"] == "kill"]
    lost = [row["seconds_to_next_step"] for row in rows("elastic_faults") if row["kind"] == "host"]
    cuts = [row for row in rows("elastic_faults") if row["kind"] == "cut" and "worlds_at_the_end_of_the_cut" in row]
    checks = [row for row in rows("elastic_faults") if row["kind"] == "check"]
    stalls = sum(row["kind"] == "stall" for row in rows("elastic_faults"))
    # where the meeting point is with a minority, all pause
    single = sum(row["worlds_at_the_end_of_the_cut"] == (row["cut"] != "1|3") for row in cuts)
    exact = sum(row["weights_equal_after_every_step"] and row["samples_exact"] for row in checks)
    beats = find("elastic_faults", kind="beats", ranks_per_host=2)
    per_rank = (beats["bytes_per_second_sent"] + beats["received"]) / 2 / 1000
    form = "{:.2f} s"
    good = rows("elastic_goodput")
    names = dict.fromkeys(row["contender"] for row in good if row["kind"] == "goodput" and row["contender"] != "ours")
    label = {"gossip": "our gossip", "torchrun": "torchrun with our checkpoints"}
    others = ", ".join(f"{label.get(name, name)} {_goodput(name):.0%}" for name in names)
    count = sum(row["deaths"] for row in good if row.get("contender") == "ours")
    told = f"Death of a host with its agent, {len(lost)} times: worst until the next step"
    hosts = [most(told, max(lost, default=0.0), 5, "elastic_faults", form)]
    return [
        most(
            f"`kill -9` of any rank, {len(kills)} times: median until the next step",
            statistics.median(kills),
            2,
            "elastic_faults",
            form,
        ),
        most("`kill -9` of any rank: worst until the next step", max(kills), 5, "elastic_faults", form),
        Result(
            "`kill -9` of any rank: kills after which the job continued",
            f"{len(kills)} of {len(kills) + stalls}",
            "all",
            stalls == 0,
            "elastic_faults",
        ),
        *(hosts if lost else []),
        Result(
            "Cuts of the network (1 to 3 of 4 hosts, one way, two hosts, a link) in which only one side trained",
            f"{single} of {len(cuts)}",
            "all",
            single == len(cuts),
            "elastic_faults",
        ),
        most(
            "Cuts of the network: worst until the next step",
            max(row["seconds_to_next_step"] for row in cuts),
            5,
            "elastic_faults",
            form,
        ),
        Result(
            "Jobs in which every step was made once, with equal bits on all ranks, and every sample equally often",
            f"{exact} of {len(checks)}",
            "all",
            exact == len(checks),
            "elastic_faults",
        ),
        most("Signs of life, per rank, both directions, its agent included", per_rank, 10, "elastic_faults", "{:.1f} kB/s"),
        least(
            f"A death every 20 s ({count} in all): steps, of those that living ranks could make ({others})",
            _goodput("ours"),
            0.9,
            "elastic_goodput",
            "{:.0%}",
        ),
    ]


def deaths_on_one_host() -> list[Result]:
    """Ranks that die, join, slow down or go wrong on one host."""
    kills, cost = find("elastic_kills", kind="summary"), find("elastic_cost", kind="ratio")
    cold, warm = (find("elastic_join", kind="median", spares=spares) for spares in (0, 1))
    growth = find("elastic_leaks", kind="growth_per_change")
    leaks = [key for key in growth if key.startswith(("rank_", "supervisor_")) and not key.endswith(("rss_kb", "mappings"))]
    leaked = sum(max(0.0, growth[key]) * growth["changes"] for key in leaks) + growth["children_left"]
    flips = [row for row in rows("silent_corruption") if row["kind"] == "flip"]
    gone = sum(row.get("gone", False) for row in flips)
    found = sum(row["named"] and row["after_steps"] <= row["every"] for row in flips)
    alarms = find("silent_corruption", kind="clean")
    slow = [row for row in rows("slow_ranks") if row["kind"] == "named"][-20:]
    in_time = sum(row["right"] and row["after_steps"] <= 20 for row in slow)
    fast = [row["of_ideal"] for row in rows("slow_ranks") if row["kind"] == "rebalance"][-8:]
    return [
        most("`kill -9` of any of 4 ranks, 50 times: worst until the next step", kills["worst"], 3, "elastic_kills", "{:.2f} s"),
        most(
            "ResNet-50 on 2 ranks: a replacement's first step, after its process has imported torch",
            cold["takes_part"],
            3,
            "elastic_join",
            "{:.2f} s",
        ),
        most(
            f"The same without torch's import of its compiler ({cold['first_optimizer']:.1f} s)",
            cold["takes_part"] - cold["first_optimizer"],
            3,
            "elastic_join",
            "{:.2f} s",
        ),
        most("A replacement's first step after the death, with `--spares 1`", warm["after_death"], 3, "elastic_join", "{:.2f} s"),
        most(
            "The others' stall meanwhile, over the time of the state alone",
            max(cold["stall_to_wire"], warm["stall_to_wire"]),
            1.2,
            "elastic_join",
            "{:.2f}x",
        ),
        most(
            f"Cost of `elastic=True` without a death, ResNet-50 on 4 ranks, {cost['steps']} steps",
            cost["elastic_to_plain"] - 1,
            0.01,
            "elastic_cost",
            "{:.1%}",
        ),
        most(
            f"{growth['changes']} changes of membership on 3 ranks: threads, descriptors, sockets and processes that stay",
            leaked,
            0,
            "elastic_leaks",
            "{:.0f}",
        ),
        Result(
            f"Flipped bits that were named in time; {gone} more the next update rounded away",
            f"{found} of {len(flips) - gone}",
            "all",
            found == len(flips) - gone,
            "silent_corruption",
        ),
        most(f"False alarms in {alarms['steps']:,} clean steps", alarms["alarms"], 0, "silent_corruption", "{:.0f}"),
        Result(
            "Slow ranks that were named within 20 steps, with the right cause",
            f"{in_time} of {len(slow)}",
            "all",
            in_time == len(slow),
            "slow_ranks",
        ),
        least(
            f'Ranks of 50, 50, 50 and 150 ms with `on_slow="rebalance"`, {len(fast)} runs: throughput, of the ideal',
            statistics.median(fast),
            0.9,
            "slow_ranks",
            "{:.0%}",
        ),
    ]


def _goodput(contender: str) -> float:
    found = [row for row in rows("elastic_goodput") if row.get("contender") == contender]
    return statistics.mean(row["goodput_of_ideal"] for row in found)


TOPICS: dict[str, tuple[Callable[[], list[Result]], str]] = {
    "One host": (
        one_host,
        "Each contender of a step is a job of its own. A step's ratio is the lower of two: of the medians, and the median of the "
        "ratios in each turn. More in [Native core](native.md) and [Bench](bench.md).",
    ),
    "One changed word": (
        one_word,
        "More in [A backend of torch.distributed](backend.md#measure-it).",
    ),
    "Several hosts": (several_hosts, "4 hosts of 2 ranks in the [lab](lab.md). More in [Bench](bench.md)."),
    "Predictions": (
        planning,
        "`phalanx plan`; nothing is fitted on more than one node. More in [Planning](planning.md#how-right-it-is).",
    ),
    "GossipGraD": (gossip, "More in [GossipGraD](gossip.md#speed)."),
    "Accuracy on slow networks": (
        slow_networks,
        "The mean difference to runs with the same seeds. More in [Slow networks](slow-networks.md#accuracy-measured).",
    ),
    "Ranks and hosts that die": (
        deaths,
        "4 hosts of one rank in the [lab](lab.md). More in [Ranks that die and join](elastic.md).",
    ),
    "Ranks that die, join, slow down or go wrong on one host": (
        deaths_on_one_host,
        "More in [Ranks that die and join](elastic.md).",
    ),
    "Large batches": (large_batches, "More in [Large batches](large-batch.md#what-the-techniques-are-worth)."),
    "Data, checkpoints, recipes": (runs, "More in [Transforms](transforms.md) and [Checkpoints](checkpoints.md)."),
}


def page() -> str:
    """One table per topic."""
    blocks = [HEAD.strip()]
    for topic, (make, said) in TOPICS.items():
        blocks += [f"## {topic}", said]
        blocks.append(
            "\n".join(
                ["| What | Result | Bar | | Measured |", "| --- | --- | --- | --- | --- |", *(result.row() for result in make())]
            )
        )
    return "\n\n".join([*blocks, TAIL.strip()]) + "\n"


def _size(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"
