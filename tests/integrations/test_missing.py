"""A framework that is not installed: the error names the package. tests/test_public_names.py: `import phalanx` loads none."""

import importlib
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
