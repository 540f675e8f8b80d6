"""docs/schedules.md shows what the commands really print, and its Python runs."""

import re
from pathlib import Path

import pytest

from phalanx.cli.main import main

TEXT = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text(encoding="utf-8")
CONSOLE = re.findall(r"^```console\n\$ phalanx (.*?)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
PYTHON = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def without_seconds(text):
    return re.sub(r"; \d+\.\d\d s\n", "; s\n", text)


def test_there_is_something_to_check():
    assert len(CONSOLE) >= 5
    assert len(PYTHON) >= 3


@pytest.mark.parametrize(("command", "printed"), CONSOLE, ids=[command for command, _ in CONSOLE])
def test_the_pictures_are_true(command, printed, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(command.split()) == 0
    assert without_seconds(capsys.readouterr().out) == without_seconds(printed)


@pytest.mark.parametrize("code", PYTHON)
def test_the_python_runs(code):
    exec(compile(code, "schedules.md", "exec"), {})
