"""Devices with published results: how fast each trains ResNet-50, its largest published batch, its memory and its peak."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    """`rate` is samples/s @ batch of ResNet-50, `most` the largest published batch. `peak` is 16-bit flop/s, `memory` bytes."""

    name: str
    rate: str
    source: str
    most: int
    most_source: str
    peak: float
    memory: float


UTILISATION = 0.4  # share of the peak that transformers reach: an assumption; published runs report 0.3 to 0.6
STATE = 16  # bytes per parameter: 16-bit weights and gradients, float32 weights and two moments of Adam

_V100 = Device(
    "V100 (16 GB)",
    "1403@208",
    "an eighth of a DGX-1 in MLPerf Training v0.6 (MXNet)",
    208,
    "DGX-1 in MLPerf Training v0.6",
    125e12,
    16e9,
)
_P100 = Device(
    "P100",
    "195@32",
    "a P100 in TensorFlow's benchmarks (DGX-1, float32)",
    128,
    "ChainerMN 1.3 on 32 P100 (chainer.org, 25 May 2018)",
    21.2e12,
    16e9,
)
DEVICES = {
    "abci": _V100,
    "mn-1": _P100,
    "titan-x": Device(
        "TITAN X",
        "82@32",
        "a TITAN X in ChainerMN's figure (chainer.org, 8 February 2017)",
        32,
        "the same post",
        6.6e12,
        12e9,
    ),
    "dgx-1": _V100,
    "dgx-2h": Device(
        "V100 (32 GB, 450 W)",
        "1580@208",
        "a sixteenth of a DGX-2H in MLPerf Training v0.7 (MXNet)",
        256,
        "DGX-2H in MLPerf Training v0.5",
        125e12,
        32e9,
    ),
    "dgx-a100": Device(
        "A100",
        "3293@408",
        "an eighth of a DGX A100 in MLPerf Training v1.1 (MXNet)",
        408,
        "DGX A100 in MLPerf Training v0.7, with 40 GB",
        312e12,
        80e9,
    ),
    "dgx-h100": Device(
        "H100",
        "7136@408",
        "an eighth of 8 H100 that took 13.466 min to 75.9 % in MLPerf Training v3.0 (Dell XE9680, 3.0-2053), with the 36 epochs"
        " and the batch of the same server with A100",
        408,
        "the same server with A100",
        989e12,
        80e9,
    ),
    "minsky": _P100,
    **{f"cloud-{rate}g": _V100 for rate in (10, 25, 100)},
}
