"""`phalanx report`: where the page goes, and one line for what is no run."""

import json

import pytest

from phalanx.cli.main import main


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"name": f"recipe-{name}"}))
        row = {"kind": "interval", "step": 1, "epoch": 0.5, "seconds": 1.0, "loss": 2.0}
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("argv", "written", "title"),
    [
        (["a"], "a/report.html", "recipe-a"),
        (["a", "b"], "report.html", "2 runs compared"),
        (["a", "--out", "c.html"], "c.html", "recipe-a"),
        (["b", "a", "--out", "b/c.html"], "b/c.html", "2 runs compared"),
    ],
)
def test_where_the_page_goes(runs, capsys, argv, written, title):
    assert main(["report", *argv]) == 0
    assert capsys.readouterr().out == f"{written}\n"
    assert f"<title>{title} · Phalanx</title>" in (runs / written).read_text()
    assert [path.relative_to(runs).as_posix() for path in runs.rglob("*.html*")] == [written]


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["nowhere"], "nowhere: there is no such directory"),
        (["."], "no config.json"),
        (["a", "."], "no config.json"),
        (["a/config.json"], "no such directory"),
        (["a", "a"], "named twice"),
        (["a", "--out", "missing/report.html"], "cannot write missing/report.html: No such file"),
        (["damaged"], "config.json"),
        ([], "DIR"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(runs, capsys, argv, told):
    (runs / "damaged").mkdir()
    (runs / "damaged" / "config.json").write_text("{")
    assert main(["report", *argv]) == 2
    said = capsys.readouterr().err
    assert told in said
    assert "Traceback" not in said
    assert said.startswith("usage:") or said.count("\n") == 1
