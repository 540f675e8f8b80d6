"""For all tests."""

from __future__ import annotations

import multiprocessing.util
import signal
import subprocess

import hypothesis
import pytest
from tests.warm.popen import Python, spawn, warm

# How long an example takes depends on what else runs on the machine.
hypothesis.settings.register_profile("phalanx", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("phalanx")

# A shell has what it starts in the background ignore Ctrl-C, and so would all processes that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# The files that take longest, in this order: with several workers they begin first, so that the last ones end together.
LONGEST = (
    "world/test_launchers.py", "world/test_failures.py", "world/test_ending.py", "world/test_grid.py",
    "world/test_elastic.py", "world/test_trainer.py",
    "world/test_meeting.py", "world/test_gossip_away.py", "world/test_shm.py", "world/test_gossip.py", "world/test_links.py",
    "world/test_leaks.py", "world/test_attacks.py", "comm/test_start.py", "grad/test_gossip_away.py", "cli/test_train.py",
    "cli/test_bench.py", "lab/test_lab.py", "train/test_trainer.py", "optim/test_contract.py", "optim/test_survives.py",
    "comm/test_meeting.py", "examples/test_examples.py", "nn/test_models.py", "optim/test_equals_one_process.py",
    "train/test_lock.py", "cluster/test_plan.py", "schedule/test_algorithms.py", "cli/test_plan.py",
)  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # a worker of `pytest -n 3`
        place = {name: number for number, name in enumerate(LONGEST)}

        def when(item: pytest.Item) -> tuple[int, bool]:
            room, file = item.path.parts[-2:]
            return place.get(f"{room}/{file}", len(place)), room != "world"  # of which each worker then has its pools once

        items.sort(key=when)


@pytest.fixture
def warm_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that the test spawns, or starts by `[sys.executable, ...]`, are forked warm: tests/warm/popen.py."""
    warm()
    monkeypatch.setattr(subprocess, "Popen", Python)
    monkeypatch.setattr(multiprocessing.util, "spawnv_passfds", spawn)
