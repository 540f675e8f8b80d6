"""PyTorch's own tests of a backend, `torch/testing/_internal/distributed/distributed_test.py`, on the backend "phalanx".

The file chooses its tests, and what it expects of them, by the name of the backend: `if BACKEND == "gloo"`. It is imported here
under the name "gloo". The test bodies then see a name that is "phalanx" for torch and equal to "gloo" for their comparisons. So
everything that the file expects of gloo is expected of Phalanx.

The ranks are forked from this process, which has imported torch already: a test takes a tenth of a second instead of three.
"""

from __future__ import annotations

import datetime
import os
import sys
import tempfile
import unittest
from typing import Any

os.environ["BACKEND"] = "gloo"
os.environ.setdefault("WORLD_SIZE", "2")
if "TEMP_DIR" not in os.environ:  # run_suite.py makes one, and removes it
    os.environ["TEMP_DIR"] = tempfile.mkdtemp(prefix="phalanx-suite-")
os.environ.setdefault("INIT_METHOD", f"file://{os.environ['TEMP_DIR']}/shared_init_file")
os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "120")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import distributed_test

ON = os.environ.get("PHALANX_SUITE_BACKEND", "phalanx")

if ON == "phalanx":
    import phalanx.backend.create  # now, rather than in every rank

    phalanx.backend.register()


def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
    """torch.distributed.monitored_barrier without its first line, which refuses every group that is not called gloo."""
    if group is not dist.GroupMember.NON_GROUP_MEMBER:
        limit = datetime.timedelta(seconds=timeout) if isinstance(timeout, float) else timeout
        options = {} if limit is None else {"timeout": limit}
        (group or dist.group.WORLD).monitored_barrier(**options, wait_all_ranks=wait_all_ranks)


class LikeGloo(str):
    """The name of our backend, and equal to gloo's."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str(self) == other or other == "gloo"

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(str(self))


class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """All tests of the file, on `WORLD_SIZE` forked ranks."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, pipe: Any, **kwargs: Any) -> None:
        if ON == "phalanx":
            distributed_test.BACKEND = LikeGloo(ON)
            dist.monitored_barrier = monitored_barrier
        super()._run(rank, test_name, file_name, pipe, **kwargs)


def names() -> list[str]:
    """The names of all tests, in one order."""
    return sorted(unittest.TestLoader().getTestCaseNames(Suite))


def run(name: str) -> tuple[str, str]:
    """Run one test. Returns ("passed" | "skipped" | "failed", the reason)."""
    result = unittest.TestResult()
    Suite(name).run(result)
    if result.skipped:
        return "skipped", result.skipped[0][1]
    broken = [*result.failures, *result.errors]
    return ("failed", broken[0][1]) if broken else ("passed", "")


if __name__ == "__main__":
    assert dist.is_available()
    for name in sys.argv[1:] or names():
        print(name, *run(name), flush=True)
