"""The page that plays a schedule: complete in itself, small, escaped, and without an error in a browser."""

import ast
import html
import json
import re
import shutil
import subprocess
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from tests.schedule.oracle import paper_swing
from tests.schedule.test_bitwise import flood

import phalanx
from phalanx.cli.main import main
from phalanx.schedule import Move, Scale, Schedule, ScheduleError, Step, gossip, lower, swing, to_html, tree

ROOT = Path(__file__).parents[2]
SOME = [
    phalanx.torus(2, 4),
    phalanx.hierarchical(2, 3),
    phalanx.ring(5),
    tree(6),
    gossip(6, 1),
    swing(8),
    paper_swing(16, together=True),
]


def data_of(page):
    return json.loads(html.unescape(re.search(r'data-schedule="(.*?)"', page, re.S).group(1)))


@pytest.mark.parametrize("s", SOME, ids=lambda s: s.name)
def test_the_page_holds_the_messages_and_the_proof(s):
    page = to_html(s)
    data = data_of(page)
    assert (data["world"], data["chunks"], data["proved"]) == (s.world, s.chunks, True)
    moves = [[(m[0], m[1], sum(b - a for a, b in m[2]), bool(m[3])) for m in step["moves"]] for step in data["steps"]]
    assert moves == [
        [(op.src, op.dst, op.count, op.reduce) for op in step.ops if isinstance(op, Move)] for step in lower(s).steps
    ]
    assert len(page.encode()) < 200_000
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)  # nothing from elsewhere


def test_rows_and_columns_of_a_torus():
    assert data_of(to_html(phalanx.torus(2, 4)))["columns"] == 4
    assert data_of(to_html(phalanx.torus(2, 3, 4)))["columns"] == 4
    assert data_of(to_html(phalanx.ring(4)))["columns"] == 1
    assert data_of(to_html(replace(phalanx.ring(4), name="torus(9x9)")))["columns"] == 1  # a name that does not fit


def test_a_wrong_schedule_is_drawn_with_what_is_wrong():
    data = data_of(to_html(Schedule("nothing", 2, 1, ())))
    assert not data["proved"]
    assert "ends as x0, wanted x0 + x1" in data["proof"]
    assert "but flood(3): the ranks do not end with equal bits" in data_of(to_html(flood(3)))["proof"]


def test_names_and_labels_stay_text():
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\x1b"
    s = Schedule(evil, 2, 1, (Step((Move(0, 1, range(1), reduce=True), Move(1, 0, range(1), reduce=True)), evil),))
    page = to_html(s)
    assert page.count("<script") == 1
    assert "<img" not in page
    assert data_of(page)["steps"][0]["label"].startswith("</script>")
    frame = s._repr_html_()
    assert frame.count("<") == 2  # <iframe ...></iframe>: the page is in an attribute
    assert html.unescape(re.search(r'srcdoc="(.*?)"', frame, re.S).group(1)) == page.replace("\x1b", "\\x1b")


def test_what_is_too_large_is_refused():
    with pytest.raises(ScheduleError, match="too many to draw"):
        to_html(phalanx.ring(512))
    assert "too many to draw" in phalanx.ring(512)._repr_html_()


def test_factors_are_named():
    s = Schedule("s", 2, 1, (Step((Scale(range(2), range(1), Fraction(1, 2)),)),), goal="mixing")
    assert "multiply by 1/2" in data_of(to_html(s))["steps"][0]["scales"]


def test_the_command_line_writes_it(tmp_path, capsys):
    path = tmp_path / "torus.html"
    assert main(["show", "torus:2x2", "--html", str(path)]) == 0
    assert path.read_text() == to_html(phalanx.torus(2, 2))
    assert main(["show", "torus:2x2", "--html", str(tmp_path / "no" / "such")]) == 2
    assert "cannot write the page" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Debian's chromium")
@pytest.mark.parametrize("s", [phalanx.torus(2, 4), phalanx.ring(3)], ids=lambda s: s.name)
def test_a_browser_plays_it_without_an_error(s, tmp_path):
    """`--dump-dom` after the script has drawn the last step; what it logs is on standard error."""
    page = tmp_path / "page.html"
    page.write_text(to_html(s).replace("start&quot;:&quot;begin", "start&quot;:&quot;end"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync", "--enable-logging=stderr", "--v=0"]  # fmt: skip
    done = subprocess.run(
        ["chromium", *flags, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", f"file://{page}"],
        capture_output=True, text=True, timeout=90, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr
    assert "✓ proved: goal sum, equal bits on all ranks" in done.stdout
    assert len(re.findall(r'class="full[ "]', done.stdout)) == s.world * s.chunks  # every chunk of every rank
    assert f"Step {len(lower(s).steps)} of {len(lower(s).steps)}" in done.stdout


def test_the_notebook_runs():
    """As a notebook would run it: the value of a cell's last line is what it shows."""
    notebook = json.loads((ROOT / "examples" / "schedules.ipynb").read_text())
    shown, names = [], {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            tree_ = ast.parse("".join(cell["source"]))
            last = tree_.body.pop() if isinstance(tree_.body[-1], ast.Expr) else None
            exec(compile(tree_, "cell", "exec"), names)
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names) if last else None  # noqa: S307  # our own notebook
            shown.append(value._repr_html_() if hasattr(value, "_repr_html_") else value)
    assert [kind for kind in shown if isinstance(kind, str)] == [shown[0], shown[2]]
    assert all(page.startswith("<iframe") for page in (shown[0], shown[2]))
    assert shown[-1] == [[6.0] * 6] * 4
    assert not any(cell.get("outputs") for cell in notebook["cells"])  # kept clean
