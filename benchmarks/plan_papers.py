"""The figures of four papers, predicted from one device and the hardware: the inputs, each with its source, and the answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from phalanx.cluster import (
    MODELS,
    NCCL,
    NCCL_WITHOUT_TREES,
    PRESETS,
    BackendProfile,
    Cluster,
    StepPlan,
    compile_schedule,
    from_one,
    predict_step,
)
from phalanx.cluster.hosts_differ import typical_slowness
from phalanx.cluster.workload import Compute
from phalanx.schedule import Schedule, gossip, hierarchical, ring, torus

RESNET50 = MODELS["resnet50"]

# The communicator of February 2017: NCCL 1 inside hosts, Open MPI between them, through the host's memory. 10 us per kernel and
# per message; 6 of FDR's 7 GB/s; PCIe as it is.
CHAINERMN_2017 = BackendProfile("chainermn-2017", call=10e-6, message=10e-6, message_inside=10e-6, network=0.85, inside=1.0)


def papers(host_spread: float, overheads: dict[str, float]) -> Iterator[dict[str, Any]]:
    """One row per figure: the paper, what it says, published, predicted, relative error."""
    yield from _chainermn(host_spread)
    yield _akiba(host_spread)
    yield _sony(host_spread)
    yield _fujitsu(host_spread, overheads["v0.6"])
    yield _gossipgrad(host_spread)


def _row(paper: str, what: str, published: float, predicted: float) -> dict[str, Any]:
    return {"paper": paper, "what": what, "published": published, "predicted": predicted, "error": predicted / published - 1}


def _seconds(
    cluster: Cluster, schedule: Schedule, compute: Compute, batch: float, plan: StepPlan, profile: BackendProfile, spread: float
) -> float:
    program = compile_schedule(schedule, cluster, profile)
    slowness = typical_slowness(cluster, spread)
    return predict_step(program, RESNET50, compute, batch, plan, slowness=slowness).seconds


def _chainermn(spread: float) -> Iterator[dict[str, Any]]:
    """Akiba, Fukuda, Suzuki, arXiv 1710.11351; chainer.org, 8 February 2017: float32, batch 32, no overlap, `hierarchical`."""
    compute = from_one(RESNET50, 32, 82, source="1 TITAN X: about 82 images/s (figure dlsummit_06)")
    plan = StepPlan(wire=4, sync="after backward")
    for gpus, published in ((2, 1.84), (4, 3.5), (8, 7.0), (16, 13.1), (32, 25.9), (64, 49.6), (128, 100.0)):
        cluster = PRESETS["titan-x"].with_ranks(gpus)
        seconds = _seconds(cluster, hierarchical(cluster.hosts, cluster.per_host), compute, 32, plan, CHAINERMN_2017, spread)
        yield _row("ChainerMN", f"speed-up on {gpus} GPUs", published, gpus * compute.seconds(32) / seconds)


def _akiba(spread: float) -> dict[str, Any]:
    """Akiba, Suzuki, Fukuda, arXiv 1711.04325: 1,024 P100 of MN-1, batch 32 per GPU, gradients in float16, rings of NCCL 2.0.5.

    ChainerMN communicates after backward. The efficiency, 80 %, is that of Sony's table. One P100: 195 images/s at batch 32
    (TensorFlow's benchmarks, DGX-1, float32).
    """
    compute = from_one(RESNET50, 32, 195)
    cluster = PRESETS["mn-1"]
    plan = StepPlan(wire=2, sync="after backward")
    seconds = _seconds(cluster, ring(1024), compute, 32, plan, NCCL_WITHOUT_TREES, spread)
    return _row("Akiba", "efficiency on 1,024 GPUs against 1 GPU", 0.8, compute.seconds(32) / seconds)


def _sony(spread: float) -> dict[str, Any]:
    """Mikami et al., arXiv 1811.05233: 1,088 V100 with 2 InfiniBand EDR per 4, float16, 2D-torus, batch 32 per GPU.

    One V100: 1,200 images/s at batch 256 in mixed precision (NVIDIA DeepLearningExamples, PyTorch, DGX-1). The paper's own rate
    is for another library and was not found; a slower device would be more efficient.
    """
    compute = from_one(RESNET50, 256, 1200)
    cluster = PRESETS["abci"].with_ranks(1088)
    plan = StepPlan(group_bytes=16e6, wire=2)
    seconds = _seconds(cluster, torus(272, 4), compute, 32, plan, NCCL, spread)
    host = cluster.with_ranks(4)
    alone = _seconds(host, ring(4), compute, 32, plan, NCCL, spread)
    return _row("Sony", "efficiency on 1,088 GPUs against 1 host", 0.9162, alone / seconds)


def _fujitsu(spread: float, overhead: float) -> dict[str, Any]:
    """Yamazaki et al., arXiv 1903.12650: 2,048 V100 of ABCI, batch 81,920, float16, 4 x 512 torus in static groups.

    One V100: 11,222 images/s of 8 at batch 208 (MLPerf v0.6, NVIDIA DGX-1, MXNet: the same framework and device).
    """
    compute = from_one(RESNET50, 208, 11222 / 8, overhead=overhead)
    cluster = PRESETS["abci"]
    seconds = _seconds(cluster, torus(512, 4), compute, 40, StepPlan(group_bytes=16e6, wire=2), NCCL, spread)
    return _row("Fujitsu", "images/s on 2,048 GPUs", 1.73e6, 81920 / seconds)


def _gossipgrad(spread: float) -> dict[str, Any]:
    """Daily et al., arXiv 1803.05880: 128 P100 with InfiniBand, weights and momentum to one partner, float32, batch 32.

    One P100: 195 images/s at batch 32 (TensorFlow's benchmarks, DGX-1). The cluster's hosts were not found: 4 P100, 1 EDR.
    """
    compute = from_one(RESNET50, 32, 195)
    cluster = PRESETS["minsky"].with_ranks(128)
    rounds = [compile_schedule(gossip(128, number), cluster, NCCL) for number in range(7)]
    slowness = typical_slowness(cluster, spread)
    plan = StepPlan(wire=4, sync="gossip")
    step = predict_step(rounds[0], RESNET50, compute, 32, plan, slowness=slowness, rounds=rounds[1:])
    efficiency = float(np.mean(compute.seconds(32) * slowness)) / step.seconds
    return _row("GossipGraD", "efficiency on 128 GPUs against 1 GPU", 1.0, efficiency)
