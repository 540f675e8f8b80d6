"""For all tests."""

from __future__ import annotations

import gc
import multiprocessing.util
import os
import re
import signal
import subprocess
import time
from collections.abc import Generator, Iterator
from typing import Any

import hypothesis
import pytest
from tests import thinned
from tests.long import times
from tests.warm.popen import Python, Worker, spawn, warm

# How long an example takes depends on what else runs on the machine.
hypothesis.settings.register_profile(
    "phalanx", deadline=None, max_examples=times(100, seldom=25), suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("phalanx")

# A shell has what it starts in the background ignore Ctrl-C, and so would all processes that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# The files that take longest, in this order: with several workers they begin first, so that the last ones end together.
LONGEST = (
    "world/test_failures.py", "world/test_ending.py", "world/test_launchers.py", "grad/test_gossip_away.py", "world/test_grid.py",
    "world/test_elastic.py", "world/test_elastic_hosts.py", "world/test_elastic_train.py", "world/test_slow_ranks.py",
    "lab/test_elastic_cuts.py", "cli/test_stop.py", "world/test_gossip_away.py",
    "world/test_meeting.py", "world/test_shm.py", "world/test_gossip.py", "world/test_trainer.py",
    "world/test_training.py", "world/test_links.py", "world/test_shuffle.py", "world/test_leaks.py", "comm/test_start.py",
    "train/test_trainer.py", "examples/test_examples.py", "optim/test_survives.py", "nn/test_models.py", "train/test_gpu.py",
    "cluster/test_plan.py", "optim/test_loops.py", "simulated_cuda/test_modes.py", "simulated_cuda/test_mutants.py",
    "train/test_lock.py", "optim/test_contract.py", "optim/test_equals_one_process.py", "cli/test_train.py", "cli/test_plan.py",
    "backend/test_collectives.py", "backend/test_pytorch_suite.py", "cli/test_selftest.py", "train/test_course.py",
    "grad/test_gossip.py", "cli/test_bench.py", "schedule/test_algorithms.py", "simulated_cuda/test_averager.py",
    "lab/test_lab.py",
)  # fmt: skip


@pytest.hookimpl(wrapper=True)
def pytest_sessionstart(session: pytest.Session) -> Generator[None]:
    """The workers of `pytest -n 3` start here. They are forked from one process that has imported torch: that takes 4 s each."""
    if not session.config.pluginmanager.hasplugin("dsession"):
        return (yield)
    warm()
    popen = subprocess.Popen
    subprocess.Popen = Worker  # type: ignore[misc]  by which execnet starts them
    try:
        return (yield)
    finally:
        subprocess.Popen = popen  # type: ignore[misc]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Each worker begins at another room: in a fresh clone each compiles a part of the files, and finds the others compiled."""
    report = yield
    worker = getattr(collector.config, "workerinput", None)
    if worker is not None and isinstance(collector, pytest.Dir) and report.passed:
        number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
        begin = number % count * len(report.result) // count
        report.result = [*report.result[begin:], *report.result[:begin]]
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("dist") != "loadfile":
        return None
    from tests.crashed_workers import FilesOnce

    return FilesOnce(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """A worker of `pytest -n 3` gets its arguments from the controller, and cannot see whether you named any."""
    node.workerinput["thinned"] = thinned.applies(node.config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    worker = getattr(config, "workerinput", None)
    if worker["thinned"] if worker is not None else thinned.applies(config):
        left = thinned.left_to_ci(items)
        config.hook.pytest_deselected(items=[item for item in items if item in left])
        items[:] = [item for item in items if item not in left]
    if hasattr(config, "workerinput"):  # a worker of `pytest -n 3`
        place = {name: number for number, name in enumerate(LONGEST)}

        def when(item: pytest.Item) -> tuple[int, bool, str]:
            room, file = item.path.parts[-2:]
            order = place.get(f"{room}/{file}", len(place))
            return order, room != "world", str(item.path)  # a worker that stays in "world" has its pools once

        items.sort(key=when)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """What is collected stays: no search for garbage walks through it, now or during the tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def abandoned() -> set[str]:
    """What lies in /dev/shm and bears the number of a process that has ended: "torch_NUMBER_...", "phalanx-NUMBER-..."."""
    found = {name: re.match(r"(?:torch_|phalanx-)(\d+)", name) for name in os.listdir("/dev/shm")}
    ended = {name for name, process in found.items() if process and not os.path.exists(f"/proc/{process[1]}")}
    return {name for name in ended if os.path.exists(f"/dev/shm/{name}")}  # it may have removed it and ended since we looked


KNOWN = abandoned()


@pytest.fixture(scope="module", autouse=True)
def nothing_stays_in_shared_memory() -> Iterator[None]:
    """A file of tests leaves nothing there. With several workers it may be another file that runs at the same time."""
    yield
    until = time.monotonic() + 5  # a file beside this one may have just killed a process, whose survivors free its memory
    while (left := abandoned() - KNOWN) and time.monotonic() < until:
        time.sleep(0.1)
    KNOWN.update(left)  # each is reported once by each worker
    assert not left, f"left in /dev/shm by a process that has ended: {sorted(left)}"


@pytest.fixture
def warm_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that the test spawns, or starts by `[sys.executable, ...]`, are forked warm: tests/warm/popen.py."""
    warm()
    monkeypatch.setattr(subprocess, "Popen", Python)
    monkeypatch.setattr(multiprocessing.util, "spawnv_passfds", spawn)
