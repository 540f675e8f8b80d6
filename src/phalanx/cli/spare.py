"""A process of `phalanx run --spares`: it has imported what a rank needs, and waits to become one.

A new process imports torch, and its first optimizer imports torch's compiler. Together that takes 4 to 5 s. A spare has done it
before a rank dies. Then the agent writes one line to its standard input, the variables that make it a rank, and the spare runs
the script as `python SCRIPT` does. If the agent ends, the line never comes, and the spare ends too.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import runpy
import sys
import types
import zipfile
from collections.abc import Sequence
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any, cast

# The first entry of sys.path changes before the first import: a spare finds the modules that the script will find.
WAIT = "import sys\nif sys.path[0] == '': sys.path[0] = sys.argv[1]\nfrom phalanx.cli.spare import main\nmain()"


def spare_command(arguments: Sequence[str]) -> list[str]:
    """What `python` gets, in order to wait and then run `python ARGUMENTS`."""
    place = Path.cwd() if arguments[0] == "-m" else Path(arguments[0]).resolve().parent
    return ["-c", WAIT, str(place), *arguments]


def main() -> None:
    """Import, wait for the line, and become a rank."""
    load()
    line = sys.stdin.readline()
    if not line.endswith("\n"):  # the agent is gone
        return
    os.environ.update(json.loads(line))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.excepthook = print_from_the_script
    run(sys.argv[2:])


def print_from_the_script(kind: type[BaseException], error: BaseException, where: types.TracebackType | None) -> None:
    """Print an uncaught exception as Python does: the traceback begins with the script, and not with what runs it here."""
    frame = where
    while frame is not None:
        if frame.tb_frame.f_globals is globals():  # of this file: the script begins after the last one
            where = frame.tb_next
        frame = frame.tb_next
    sys.__excepthook__(kind, error.with_traceback(where), where)


def load() -> None:
    """Import what a rank imports until its first step."""
    import torch

    import phalanx

    for name in phalanx.__all__:
        getattr(phalanx, name)
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # the first optimizer of a process imports torch's compiler


def run(arguments: list[str]) -> None:
    """Do in this process what `python ARGUMENTS` does. The module `__main__` stays until the end, for threads that pickle."""
    sys.orig_argv = [sys.executable, *arguments]
    program = sys.modules["__main__"] = types.ModuleType("__main__")
    names: dict[str, Any]
    loader: InspectLoader
    file: str | None
    if arguments[0] == "-m":
        spec = find_program(arguments[1])
        loader = cast(InspectLoader, spec.loader)
        sys.argv = [str(spec.origin), *arguments[2:]]
        names = {"__spec__": spec, "__package__": spec.parent, "__cached__": spec.cached}
        file, code = spec.origin, loader.get_code(spec.name)
    else:
        sys.argv, file = arguments, os.path.join(os.getcwd(), arguments[0])  # as Python does: with its dots
        if zipfile.is_zipfile(file) or file.endswith(".pyc"):
            runpy.run_path(file, run_name="__main__")
            return
        names, loader = {"__cached__": None}, SourceFileLoader("__main__", file)
        with io.open_code(file) as source:
            code = compile(source.read(), file, "exec", dont_inherit=True)
    vars(program).update(names, __file__=file, __loader__=loader)
    exec(code or "", vars(program))


def find_program(module: str) -> ModuleSpec:
    """What `python -m MODULE` runs: the module, or `__main__` of the package."""
    spec = importlib.util.find_spec(module)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{module}.__main__")
    if spec is None:
        raise ModuleNotFoundError(f"No module named {module}")
    return spec
