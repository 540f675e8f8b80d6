"""Import your functions and classes by name: `my_package.nets:make_model`.

An import path runs code, so it is resolved only on the command line or in a recipe. Records and checkpoints
store it as text, and reading them imports nothing.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from phalanx.train.setting_text import ConfigError, shorten

FORM = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def is_import_path(text: str) -> bool:
    """Whether a text has the form `package.module:name`."""
    return FORM.fullmatch(text) is not None


def check_import_path(text: str, names: str) -> None:
    """Raise ValueError unless `text` is one of `names`, which the message lists, or an import path."""
    if not is_import_path(text):
        raise ValueError(f"one of {names}, or an import path such as my_package.module:name")


def make_importable(directory: Path) -> None:
    """Let Python find modules in a directory, as `python -m` does for the current one, unless run with -P."""
    if not getattr(sys.flags, "safe_path", False) and str(directory) not in sys.path:
        sys.path.insert(0, str(directory))


def find(path: str, setting: str) -> Any:
    """Resolve an import path. ConfigError, which names the setting, if it does not exist or its module fails."""
    module_name, _, name = path.partition(":")
    told = f"{setting}={shorten(path)}"
    make_importable(Path.cwd())  # only now: a run without import paths must not execute files from this directory
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"{told}: there is no module {error.name}; modules are found in this directory and in Python's packages"
            ) from None
        raise ConfigError(f"{told}: {describe_error(error)}") from None
    except (Exception, SystemExit) as error:  # noqa: BLE001  a user's module may do anything
        raise ConfigError(f"{told}: {describe_error(error)}") from None
    for part in name.split("."):
        if not hasattr(found, part):
            known = [own for own in dir(found) if not own.startswith("_")]
            close = difflib.get_close_matches(part, known, n=1)
            raise ConfigError(f"{told}: {module_name} has no {part}{f' ({close[0]}?)' if close else ''}")
        found = getattr(found, part)
    return found


def find_callable(path: str, setting: str) -> Callable[..., Any]:
    """The function or class that an import path names."""
    found = find(path, setting)
    if not callable(found):
        raise ConfigError(f"{setting}={path}: it is a {type(found).__name__}, not a function or class")
    made: Callable[..., Any] = found
    return made


def check_arguments_of(function: Callable[..., Any], args: Mapping[str, Any], path: str, setting: str, given: int = 0) -> None:
    """Raise ConfigError for an argument that a function does not take, or that it needs and does not get.

    `given` is the number of positional arguments it gets.
    """
    parameters = parameters_of(function)
    if parameters is None:
        return
    named = [p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    placed = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:given]
    free = [p.name for p in named if p not in placed]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for name, value in args.items():
        if name not in free and not takes_any:
            close = difflib.get_close_matches(name, free, n=1)
            raise ConfigError(
                f"{setting}.args.{name}={shorten(str(value))}: {path} has no such parameter"
                f"{f' ({close[0]}?)' if close else ''}; it takes {', '.join(free) or 'none'}"
            )
    missing = [p.name for p in named if p.name in free and p.default is p.empty and p.name not in args]
    if missing:
        raise ConfigError(f"{setting}={path} needs {', '.join(missing)}: --set {setting}.args.{missing[0]}=VALUE")


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """The parameters of a function, or of a class without `self`; None if Python does not know them."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):
        return None


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has a parameter of this name; `**options` do not count."""
    return any(p.name == name and p.kind is not p.VAR_KEYWORD for p in parameters_of(function) or [])


def as_given(function: Callable[..., Any], args: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as a function expects them: a list becomes a tuple if the default is one."""
    tuples = {p.name for p in parameters_of(function) or [] if isinstance(p.default, tuple)}
    return {name: tuple(value) if name in tuples and isinstance(value, list) else value for name, value in args.items()}


@contextmanager
def blamed_on(told: str) -> Iterator[None]:
    """Turn an exception of the user's function into one line that names the setting, the error and its location."""
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # a user's function may do anything
        raise ConfigError(f"{told}: {describe_error(error)}") from error


def describe_error(error: BaseException) -> str:
    """An error in one line: type, message, and the innermost location outside Phalanx, torch and Python itself."""
    inside = (str(Path(__file__).parents[1]), "<frozen", "/torch/", str(Path(inspect.__file__).parent))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not any(part in frame.filename for part in inside)]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:500]}{where}"
