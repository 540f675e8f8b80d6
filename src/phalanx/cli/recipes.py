"""Load recipes by name or from a file. A file can import modules beside it, as a script can."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from phalanx.cli.usage import UsageError
from phalanx.schedule.names import is_file

if TYPE_CHECKING:  # torch takes seconds to import, and `phalanx --help` does not need it
    from phalanx.train.config import RunConfig

RECIPES = Path(__file__).parents[1] / "recipes"


def recipe_names() -> list[str]:
    """The recipes that come with Phalanx."""
    return sorted(path.stem.replace("_", "-") for path in RECIPES.glob("[a-z]*.py"))


def load(recipe: str) -> RunConfig:
    """Load the `config` of a recipe by name or file. Import paths in a file also find modules beside it."""
    from phalanx.train.config import RunConfig
    from phalanx.train.import_path import make_importable

    if recipe in recipe_names():
        module = _execute(RECIPES / f"{recipe.replace('-', '_')}.py", f"recipe_{recipe.replace('-', '_')}", recipe)
    else:
        path = Path(recipe)
        if not is_file(path):
            raise UsageError(f"{recipe!r} is neither a recipe nor a file; the recipes are {', '.join(recipe_names())}")
        make_importable(path.absolute().parent)
        module = _execute(path, name_of(path), recipe)
    config = getattr(module, "config", None)
    if not isinstance(config, RunConfig):
        raise UsageError(f"{recipe}: a recipe has one `config = RunConfig(...)`, but this one has {type(config).__name__}")
    return config


def name_of(path: Path) -> str:
    """The module name of a recipe: that of its file, so that `my_net:make_model` in my_net.py means the file itself.

    Returns another name if a module already has this one.
    """
    known = sys.modules.get(path.stem)
    taken = path.stem in sys.stdlib_module_names or path.stem == "phalanx"
    if known is not None and not taken:
        taken = getattr(known, "__file__", None) != str(path.absolute())
    return path.stem if path.stem.isidentifier() and not taken else f"recipe_{path.stem}"


def _execute(path: Path, name: str, recipe: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path.absolute())
    if spec is None or spec.loader is None:
        raise UsageError(f"{recipe}: a recipe is a Python file, with one `config = RunConfig(...)`")
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001  a user's file may do anything
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
        raise UsageError(f"{path}: {type(error).__name__}: {error}") from None
    return module
