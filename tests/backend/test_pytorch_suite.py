"""A few of PyTorch's own tests of a backend. `.ci/backend` runs all of them, on 2, 3 and 4 ranks."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOME = [
    "test_all_gather_object_default_pg",
    "test_all_reduce_coalesced_sum",
    "test_all_reduce_sum_async",
    "test_barrier_timeout_global",
    "test_static_graph_api_cpu",
    "test_ddp_create_graph",
    "test_isend_autograd_profiler",
    "test_monitored_barrier_gloo",
    "test_send_recv_any_source",
    "test_reduce_sum",
]


@pytest.mark.skipif(importlib.util.find_spec("expecttest") is None, reason="PyTorch's tests import expecttest")
@pytest.mark.usefixtures("warm_python")
def test_some_of_pytorchs_own_tests_pass(tmp_path):
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "tests.backend.run_suite", "--world", "2", "--out", str(out), "--only", *SOME]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.count("passed") == len(SOME), done.stdout
