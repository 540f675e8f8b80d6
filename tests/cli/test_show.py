"""`phalanx show`."""

import json

import pytest

from phalanx.cli.main import main
from phalanx.schedule import from_json, from_text, lower, show, torus, tree


@pytest.fixture(autouse=True)
def _terminal_of_100_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


def test_the_picture(capsys):
    assert main(["show", "torus:2x3"]) == 0
    assert capsys.readouterr().out == show(torus(2, 3))


def test_the_picture_lowered(capsys):
    assert main(["show", "torus:2x3", "--lower"]) == 0
    assert capsys.readouterr().out == show(lower(torus(2, 3)))


def test_the_picture_is_as_wide_as_the_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    main(["show", "torus:2x3", "--lower"])
    assert capsys.readouterr().out == show(lower(torus(2, 3)), width=60)


def test_all_ranks(capsys):
    main(["show", "ring:20"])
    assert "not shown: ranks 12-15" in capsys.readouterr().out
    main(["show", "ring:20", "--all"])
    out = capsys.readouterr().out
    assert "not shown" not in out
    assert all(f"rank {rank} " in out for rank in range(20))


def test_forms_for_programs(capsys):
    assert main(["show", "torus:2x3", "--lower", "--text"]) == 0
    assert from_text(capsys.readouterr().out) == lower(torus(2, 3))
    assert main(["show", "torus:2x3", "--json"]) == 0
    assert from_json(capsys.readouterr().out) == torus(2, 3)


def test_trace(tmp_path, capsys):
    path = tmp_path / "trace.json"
    assert main(["show", "tree:5", "--trace", str(path)]) == 0
    out, err = capsys.readouterr()
    assert out == show(tree(5))
    assert err == f"trace: {path}\n"
    assert len(json.loads(path.read_text())["traceEvents"]) > 5


def test_a_trace_that_cannot_be_written_is_one_line(tmp_path, capsys):
    assert main(["show", "ring:2", "--trace", str(tmp_path / "no" / "where.json")]) == 2
    assert capsys.readouterr().err.startswith("phalanx: cannot write the trace: ")


def test_two_forms_at_once_are_wrong_usage(capsys):
    assert main(["show", "ring:2", "--text", "--json"]) == 2
    assert "not allowed with" in capsys.readouterr().err
