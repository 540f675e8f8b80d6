"""Without the native core: the package installs, imports and says what is missed, once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def python(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, timeout=120, check=True, cwd=ROOT, env=os.environ | env
    )


def test_missing_it_is_reported_in_one_line():
    program = (
        "import sys; sys.modules['phalanx._native'] = None\n"
        "from phalanx.comm.transports import shm\nfrom phalanx.comm.transports import shm\n"
    )
    ended = python("-c", program)
    assert len(ended.stderr.splitlines()) == 1
    assert "no native core" in ended.stderr
    assert "torch.distributed" in ended.stderr


def test_switched_off_nobody_joins_and_nothing_is_said():
    program = (
        "import torch.distributed as dist\nfrom phalanx.comm.transports.shm import HostTeam\n"
        "print(HostTeam.join(dist.HashStore(), 0, 1, timeout=5, name='alone'))"
    )
    ended = python("-c", program, PHALANX_NATIVE="0")
    assert ended.stdout.strip() == "None"
    assert ended.stderr == ""


@pytest.mark.skipif(sys.platform != "linux", reason="the core is for Linux")
def test_without_a_compiler_the_build_succeeds(tmp_path):
    built = python(
        "setup.py", "-q", "build_ext", "--force", "--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp"),
        CC="/bin/false", CXX="/bin/false",
    )  # fmt: skip
    assert "_native" in built.stdout + built.stderr  # setuptools says what it leaves out
    assert not list(tmp_path.rglob("*.so"))
