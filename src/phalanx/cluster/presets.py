"""Published machines, each number with its source. Change them with `Cluster.with_ranks` or in a file.

Bandwidths are the vendor's, each way. A library's `BackendProfile` has the share that it reaches. Latencies between hosts are
those of the wire and the cards. The profile also has what a library adds per message.
"""

from __future__ import annotations

from .machine import GB, GBIT, Cluster, Link, Uplink

_NVLINK = "NVLink 0.3 us: TACCL topology files"
_IB = "InfiniBand 2.6 us one way between GPUs: TACCL topology files (alpha of Azure NDv2)"
_TCP = "30 us one way through two kernels' TCP: assumption, measure yours with `phalanx bench allreduce`"

_ALL = (
    Cluster(
        "abci",
        hosts=512,
        per_host=4,
        inside=Link(0.3e-6, 50 * GB),
        shared="pair",
        network=Link(2.6e-6, 100 * GBIT),
        ports=2,
        sources=(
            ("hosts", "1088 nodes of 4 V100 SXM2, 2 InfiniBand EDR; 512 nodes in Yamazaki et al., arXiv 1903.12650"),
            ("inside.bandwidth", "2 NVLink 2.0 of 25 GB/s between any two of 4 V100 in such nodes"),
            ("latency", f"{_NVLINK}; {_IB}"),
        ),
    ),
    Cluster(
        "mn-1",
        hosts=128,
        per_host=8,
        inside=Link(1e-6, 12 * GB),
        shared="rank",
        network=Link(2.6e-6, 56 * GBIT),
        ports=2,
        uplink=Uplink(16, 16 * 56 * GBIT),
        sources=(
            ("hosts", "128 nodes of 8 P100, 2 InfiniBand FDR of 56 Gbit/s, groups of 16 nodes: tech.preferred.jp on MN-1"),
            ("inside.bandwidth", "PCIe 3.0 x16, 12 GB/s of payload"),
            ("uplink", "the uplinks of a group are its bottleneck (same source); half of its ports' bandwidth is an assumption"),
            ("latency", _IB),
        ),
    ),
    Cluster(
        "titan-x",
        hosts=32,
        per_host=4,
        inside=Link(5e-6, 10 * GB),
        shared="host",
        network=Link(2.6e-6, 56 * GBIT),
        sources=(
            ("hosts", "32 nodes of 4 GTX TITAN X (Maxwell), InfiniBand FDR 4X: chainer.org, 8 February 2017"),
            ("inside.bandwidth", "PCIe 3.0, 10 GB/s, all messages through one root complex: assumption"),
            ("latency", _IB),
        ),
    ),
    Cluster(
        "dgx-1",
        hosts=1,
        per_host=8,
        inside=Link(0.3e-6, 150 * GB),
        shared="rank",
        network=Link(2.6e-6, 100 * GBIT),
        ports=4,
        sources=(
            ("hosts", "8 V100 SXM2, 4 InfiniBand EDR: system descriptions of MLPerf Training v0.6"),
            ("inside.bandwidth", "6 NVLink 2.0 of 25 GB/s per GPU, which NCCL's rings use together"),
            ("latency", f"{_NVLINK}; {_IB}"),
        ),
    ),
    Cluster(
        "dgx-2h",
        hosts=1,
        per_host=16,
        inside=Link(0.3e-6, 150 * GB),
        shared="rank",
        network=Link(2.6e-6, 100 * GBIT),
        ports=8,
        sources=(
            ("hosts", "16 V100 SXM3, 8 InfiniBand EDR for compute: system descriptions of MLPerf Training v0.7"),
            ("inside.bandwidth", "300 GB/s bidirectional per GPU through NVSwitch 1.0 (same descriptions)"),
            ("latency", f"{_NVLINK}; {_IB}"),
        ),
    ),
    Cluster(
        "dgx-a100",
        hosts=1,
        per_host=8,
        inside=Link(0.3e-6, 300 * GB),
        shared="rank",
        network=Link(2.6e-6, 200 * GBIT),
        ports=8,
        sources=(
            ("hosts", "8 A100, 8 InfiniBand HDR for compute: system descriptions of MLPerf Training v1.1"),
            ("inside.bandwidth", "600 GB/s bidirectional per GPU through NVSwitch 2.0 (same descriptions)"),
            ("latency", f"{_NVLINK}; {_IB}"),
        ),
    ),
    Cluster(
        "dgx-h100",
        hosts=1,
        per_host=8,
        inside=Link(0.3e-6, 450 * GB),
        shared="rank",
        network=Link(2.6e-6, 400 * GBIT),
        ports=8,
        sources=(
            ("hosts", "8 H100, 8 InfiniBand NDR: NVIDIA's data sheet"),
            ("inside.bandwidth", "900 GB/s bidirectional per GPU; 741 were seen at most: astra-sim-docs, validation/hardware"),
            ("latency", f"{_NVLINK}; {_IB}"),
        ),
    ),
    Cluster(
        "minsky",
        hosts=1,
        per_host=4,
        inside=Link(0.3e-6, 40 * GB),
        shared="pair",
        network=Link(2.6e-6, 100 * GBIT),
        ports=1,
        sources=(
            ("hosts", "4 P100 with NVLink: Cho et al., arXiv 1708.02188 (64 of them); 1 InfiniBand EDR is an assumption"),
            ("inside.bandwidth", "2 NVLink 1.0 of 20 GB/s between neighbours"),
            ("latency", f"{_NVLINK}; {_IB}"),
        ),
    ),
    *(
        Cluster(
            f"cloud-{rate}g",
            hosts=1,
            per_host=8,
            inside=Link(0.3e-6, 150 * GB),
            shared="rank",
            network=Link(30e-6, rate * GBIT),
            sources=(
                ("hosts", f"8 GPUs with NVLink and one {rate} GbE card, as cloud providers rent them"),
                ("inside.bandwidth", "6 NVLink 2.0 of 25 GB/s per GPU"),
                ("latency", _TCP),
            ),
        )
        for rate in (10, 25, 100)
    ),
    Cluster(
        "lab",
        hosts=4,
        per_host=2,
        inside=Link(5e-6, 44 * GB),
        shared="host",
        network=Link(50e-6, 0.956 * GBIT),
        sources=(
            ("hosts", "benchmarks/lab.py --hosts 4 --per-host 2 --rate 1gbit"),
            ("network.bandwidth", "TCP carries 0.956 of the rate: docs/lab.md, measured 2026-11-15"),
            ("network.latency", "half of the median round trip of 0.10 ms (same measurement)"),
            ("inside.bandwidth", "read and write in place by 2 cores, 44 GB/s, measured 2026-11-15; gloo reaches little of it"),
            ("inside.latency", "assumption; calibrate"),
        ),
    ),
)

PRESETS = {cluster.name: cluster for cluster in _ALL}
