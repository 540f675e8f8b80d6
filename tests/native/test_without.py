"""Without the native core: the package installs, imports and says what is missed, once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def python(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, timeout=120, check=True, cwd=ROOT, env=os.environ | env
    )


ANEW = "import sys; [sys.modules.pop(name) for name in [*sys.modules] if name.partition('.')[0] == 'phalanx']\n"


@pytest.mark.usefixtures("warm_python")
def test_missing_it_is_reported_in_one_line():
    program = "sys.modules['phalanx._native'] = None\nfrom phalanx.native import core\nfrom phalanx.native import core\n"
    ended = python("-c", ANEW + program)
    assert len(ended.stderr.splitlines()) == 1
    assert "no native core" in ended.stderr
    assert "torch.distributed" in ended.stderr


@pytest.mark.usefixtures("warm_python")
def test_switched_off_nobody_joins_and_nothing_is_said():
    program = (
        "import torch.distributed as dist\nfrom phalanx.native.team import HostTeam\n"
        "print(HostTeam.join(dist.HashStore(), 0, 1, timeout=5, name='alone'))"
    )
    ended = python("-c", ANEW + program, PHALANX_NATIVE="0")
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


@pytest.fixture
def stale_tree(tmp_path):
    """What a build reads, and what an earlier one has left: a core, in `build/` and in place, and a module since deleted."""
    tree = tmp_path / "tree"
    ignore = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    for name in ("src", "csrc"):
        shutil.copytree(ROOT / name, tree / name, ignore=ignore)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, tree / name)
    core = f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    built = tree / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / "phalanx"
    built.mkdir(parents=True)
    for stale in (built / core, built / "deleted.py", tree / "src" / "phalanx" / core):
        stale.write_text("of an earlier version")
    return tree


@pytest.mark.skipif(sys.platform != "linux", reason="the core is for Linux")
def test_without_a_compiler_a_wheel_has_no_core_of_an_earlier_build(stale_tree, tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", str(tmp_path), "."]
    env = os.environ | {"CC": "/bin/false", "CXX": "/bin/false"}
    made = subprocess.run(command, cwd=stale_tree, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    (wheel,) = tmp_path.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    assert "phalanx/__init__.py" in names
    assert [name for name in names if "_native" in name] == ["phalanx/_native.pyi"]
    assert "phalanx/deleted.py" not in names
    # the digits in it have a licence of their own
    (metadata,) = [archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA")]
    assert "License-Expression: Apache-2.0 AND CC-BY-4.0\n" in metadata
    (notice,) = [archive.read(name).decode() for name in names if name.endswith(".dist-info/licenses/NOTICE")]
    assert "digits.npz" in notice
    assert "https://creativecommons.org/licenses/by/4.0/" in notice


@pytest.mark.skipif(sys.platform != "linux", reason="the core is for Linux")
def test_without_a_compiler_a_core_in_place_goes(stale_tree):
    """As an editable install has it."""
    env = os.environ | {"CC": "/bin/false", "CXX": "/bin/false"}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(command, cwd=stale_tree, env=env, capture_output=True, timeout=120, check=True)
    assert not list(stale_tree.rglob("*.so"))
