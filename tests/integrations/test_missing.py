"""A framework that is not installed: the error names the package. And `import phalanx` loads none of them."""

import importlib
import subprocess
import sys

import pytest

FILES = {
    "lightning": ("lightning.pytorch.strategies", "pip install lightning"),
    "pytorch_lightning": ("pytorch_lightning.strategies", "pip install pytorch-lightning"),
    "fabric": ("lightning.fabric.strategies", "pip install lightning"),
    "transformers": ("transformers", "pip install 'transformers[torch]'"),
}


@pytest.mark.parametrize("name", FILES)
def test_the_error_names_the_package(name, monkeypatch):
    package, remedy = FILES[name]
    for part in (package.split(".")[0], package):
        monkeypatch.setitem(sys.modules, part, None)  # as if it were not there
    monkeypatch.delitem(sys.modules, f"phalanx.integrations.{name}", raising=False)
    with pytest.raises(ImportError) as caught:
        importlib.import_module(f"phalanx.integrations.{name}")
    assert remedy in str(caught.value)
    assert f"phalanx.integrations.{name}" in str(caught.value)


def test_import_phalanx_loads_no_framework():
    program = """
import sys, phalanx
for name in phalanx.__all__:
    getattr(phalanx, name)
print([name for name in ("lightning", "transformers", "accelerate", "ray", "phalanx.integrations") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
