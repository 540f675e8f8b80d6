"""Jobs of the frameworks under test: ranks that find each other as under torchrun, with a deadline, ended by their ids."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence

import pytest
from tests.world.programs.herd import ROOT, clean_environment

DEADLINE = 170.0  # seconds: a job imports a framework in each rank, on a busy machine


def needs(package: str) -> pytest.MarkDecorator:
    """Skip where a framework is not installed. It is not imported here: its warnings are errors in pytest."""
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"no {package}: `make frameworks` installs it")


def play(program: Sequence[object], ranks: int = 2, env: dict[str, str] | None = None) -> str:
    """Run `python PROGRAM` on every rank; what all ranks printed, on both outputs. A rank that fails is an error."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    told = {"TORCHELASTIC_RUN_ID": "test", "HF_HUB_OFFLINE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    common = clean_environment() | {name: str(value) for name, value in place.items()} | told | (env or {})
    started = []
    with tempfile.TemporaryFile("w+") as out:
        try:
            for rank in range(ranks):
                own = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                command = [sys.executable, *map(str, program)]
                started.append(subprocess.Popen(command, env=own, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT))
            for process in started:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=DEADLINE)
        finally:
            for process in started:
                if process.poll() is None:
                    process.kill()
                process.wait()
        out.seek(0)
        said = out.read()
    assert [process.returncode for process in started] == [0] * ranks, f"{program}\n{said[-8000:]}"
    return said
