"""Every training mode on simulated GPUs, for some seeds: the bits of the CPU run, nothing unordered, and no wait of the host.

PHALANX_TEST_SEEDS=1000 runs 1,000 seeds of each, as CI does.
"""

import functools

import pytest
import torch
from tests.long import often
from tests.simulated_cuda.seeds import seeds
from tests.simulated_cuda.training import MODES, differences, on_cpu, on_gpus

import phalanx


@functools.cache
def wanted(name, world, hosts):
    return on_cpu(world, MODES[name], hosts=hosts)


@pytest.mark.parametrize("name", MODES)
def test_two_gpus_compute_the_bits_of_the_cpu(name):
    for seed in seeds(1):
        found, made = on_gpus(2, MODES[name], seed)
        assert differences(found, wanted(name, 2, 1)) == [], f"seed {seed}"
        assert [made.processes[rank + 1].contexts for rank in range(2)] == [{0}, {1}], "contexts on foreign GPUs"
        unexpected = [str(sync) for outcome in found for sync in outcome.waits if sync.what not in MODES[name].waits]
        assert not unexpected, f"seed {seed}: the host waits for its device\n" + "\n".join(unexpected[:5])


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [
        ("overlap", phalanx.torus(2, 2)),
        ("double buffering", None),
        ("gossip of weights, overlapped", None),
        *often(
            ("overlap", None), ("double buffering", phalanx.torus(2, 2)), ("gossip of weights, overlapped", phalanx.torus(2, 2))
        ),
    ],
    ids=lambda value: {None: "one call"}.get(value, str(value)),
)
def test_four_gpus_on_two_hosts_train_as_the_cpu(name, algorithm):
    """Sums of four ranks have several orders, so they are close, and equal between the ranks where the mode says so."""
    expected = wanted(name, 4, 2)
    for seed in seeds(1):
        found, made = on_gpus(4, MODES[name], seed, hosts=2, algorithm=algorithm)
        torch.testing.assert_close([x.weights for x in found], [x.weights for x in expected])
        assert differences(found, [found[0]] * 4) == [] or "gossip" in name
        assert [made.processes[rank + 1].contexts for rank in range(4)] == [{0}, {1}] * 2
        assert [str(sync) for outcome in found for sync in outcome.waits] == []


def test_a_seed_can_be_replayed_with_all_its_threads():
    for seed in seeds(1):
        first, second = (on_gpus(2, MODES["double buffering"], seed)[1].trace for _ in range(2))
        assert first == second
