"""What `phalanx bench` times: on a GPU, until its queue is empty."""

import torch
from tests.simulated_cuda.simulated import simulated
from tests.simulated_cuda.simulation import process

from phalanx.bench.stopwatch import Stopwatch


def test_a_gpu_is_waited_for_before_and_after():
    with simulated(gpus_per_host=2, seed=0):
        device = torch.device("cuda", 1)
        x = torch.ones(3).to(device)
        before = len(process().syncs)
        watch = Stopwatch(device)
        x += 1
        assert watch.seconds() >= 0
        assert [sync.what for sync in process().syncs[before:]] == ["synchronize", "synchronize"]
        assert x.tolist() == [2.0, 2.0, 2.0]


def test_a_cpu_is_not():
    assert Stopwatch(torch.device("cpu")).seconds() >= 0
