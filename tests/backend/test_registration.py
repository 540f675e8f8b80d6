"""torch finds the backend by itself where Phalanx is installed, and after `import phalanx` on a source tree."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.long import often

ROOT = Path(__file__).parents[2]


def install(folder: Path) -> None:
    """What pip writes for the entry point of pyproject.toml."""
    entry = re.search(r'\[project.entry-points."(torch.backends)"\].*\n(.+)', (ROOT / "pyproject.toml").read_text())
    assert entry is not None
    info = folder / "phalanx_backend-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: phalanx_backend\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{entry[1]}]\n{entry[2].replace(chr(34), '')}\n")


@pytest.mark.parametrize("installed", [True, *often(False)], ids=["installed", *often("source tree")])
def test_torch_finds_the_backend(installed, tmp_path):
    if installed:
        install(tmp_path)
    program = f"""
import sys, torch
{"" if installed else "import phalanx"}
print(torch.distributed.is_backend_available("phalanx"), "phalanx.comm" in sys.modules)
"""
    environ = dict(os.environ, PYTHONPATH=f"{ROOT / 'src'}{os.pathsep}{tmp_path}")
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["True", "False"]  # and nothing that a group needs is loaded yet
