"""A test that hangs fails once, and all others run, also if a new worker gets only one of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.long import often

ROOT = Path(__file__).parents[1]
FILES = """
import time, pytest

@pytest.mark.parametrize("number", range({count}))
def test_number(number):
    if number == {hangs}:
        time.sleep(1000)
"""
CONFTEST = """
from tests.crashed_workers import FilesOnce

def pytest_xdist_make_scheduler(config, log):
    return FilesOnce(config, log)
"""
INI = "[pytest]\nfaulthandler_timeout = 1\nfaulthandler_exit_on_timeout = true\n"


@pytest.mark.parametrize("hangs", [1, *often(0, 2)])
def test_the_others_run(hangs, tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text(INI)
    (tmp_path / "test_hangs.py").write_text(FILES.format(count=3, hangs=hangs))
    (tmp_path / "test_other.py").write_text(FILES.format(count=2, hangs=None))
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider", "."]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert re.search(r"1 failed, 4 passed", done.stdout), done.stdout
    assert re.findall(r"crashed while running '(.*)'", done.stdout) == [f"test_hangs.py::test_number[{hangs}]"], done.stdout
