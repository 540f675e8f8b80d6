"""The page of a run: its numbers are the rows', whatever the rows are, and a browser shows them without loading anything."""

import base64
import hashlib
import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from itertools import combinations, pairwise
from random import Random
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.recipes.digits import config as digits
from phalanx.schedule import Move, halving_doubling, hierarchical, lower, ring, to_text, torus, tree
from phalanx.train.report import ReportError, build, write_report
from phalanx.train.report.axis import AxisScale, decades, ticks
from phalanx.train.report.pictures import draw_schedule
from phalanx.train.report.plots import MOST, Series, plot_bars, plot_lines, plot_stack, thin
from phalanx.train.report.prediction import prediction
from phalanx.train.report.run import NO_END, Run, read_run, read_runs
from phalanx.train.report.timeline import draw_timeline

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def interval(step, *, per_epoch=10, **changed):
    epoch = step / per_epoch
    row = {
        "kind": "interval",
        "step": step,
        "epoch": epoch,
        "rate": 0.1 / step,
        "batch": 120 if step < 30 else 240,
        "seconds": step / 4,
    }
    row |= {
        "loss": 2.3 * math.exp(-epoch),
        "accuracy": 1 - math.exp(-epoch),
        "images_per_second": 1000.0 + step,
        "wait_share": 0.25,
    }
    row |= {"times": {"input": 0.001, "compute": 0.02, "wait": 0.007, "update": 0.002}, "overlapped_share": 0.5}
    return row | changed


def evaluation(epoch, **changed):
    found = {"top1": 1 - 0.5**epoch, "top5": 1.0, "loss": 0.5**epoch}
    return {"kind": "evaluation", "step": 10 * epoch, "epoch": epoch, "seconds": 2.5 * epoch} | found | changed


START = {"kind": "start", "step": 0, "ranks": 2, "seconds": 0.0}
END = {"kind": "end", "epochs": 6, "steps": 60, "top1": 0.98, "top5": 1.0, "loss": 0.02, "seconds": 16.0, "why": "epochs"}
ROWS = (START, *(interval(step) for step in range(5, 65, 5)), *(evaluation(epoch) for epoch in range(1, 7)), END)
ENVIRONMENT = {
    "date": "2026-01-02T03:04:05+00:00",
    "command": ["phalanx", "train"],
    "versions": {"phalanx": "0.1.0"},
    "host": "h",
    "cores": 2,
    "device": "CPU",
    "ranks": 2,
    "hosts": 1,
    "schedule": {"name": "ring(2)", "text": to_text(ring(2))},
}


def run(name="r", rows=ROWS, config=None, environment=ENVIRONMENT, trace=None):
    return Run(name, config or {"name": "digits", "epochs": 6}, environment, tuple(rows), trace)


def plots(text):
    """By title, the SVG elements of a page or a plot."""
    found = re.findall(r'<svg class="(?:plot|bars).*?</svg>', text, re.DOTALL)
    return {svg.get("aria-label"): svg for svg in map(ElementTree.fromstring, found)}


def series(svg):
    """By name: places and values as the page tells them, and the points as they are drawn."""
    found = {}
    for g in svg.iter("g"):
        xs, ys = ([float(word) if word != "-" else None for word in g.get(key).split()] for key in ("data-x", "data-y"))
        found[g.get("data-name")] = (xs, ys, g)
    return found


def drawn(g):
    """The points of all pieces of a line, and how many pieces there are."""
    pieces = [[tuple(map(float, p.split())) for p in path.get("d")[1:].split(" L")] for path in g.iter("path")]
    pieces += [[(float(dot.get("cx")), float(dot.get("cy")))] for dot in g.iter("circle")]
    return pieces


def unscale(svg, point):
    """From a place on the page to the values there: the inverse of what the plot did, from what it says of its axes."""
    left, right, top, bottom = map(float, svg.get("data-box").split())
    x0, x1, y0, y1 = (float(svg.get(f"data-{name}")) for name in ("x0", "x1", "y0", "y1"))
    x = x0 + (point[0] - left) / (right - left) * (x1 - x0)
    share = (bottom - point[1]) / (bottom - top)
    return x, y0 * (y1 / y0) ** share if svg.get("data-log") == "1" else y0 + share * (y1 - y0)


# ---- numbers -----------------------------------------------------------------------------------------------------------------


def test_every_series_has_the_rows_numbers_and_is_drawn_where_they_are():
    found = plots(build([run()]))
    wanted = {
        "loss over epochs": {"training": ("interval", "epoch", "loss"), "test": ("evaluation", "epoch", "loss")},
        "loss over seconds": {"training": ("interval", "seconds", "loss"), "test": ("evaluation", "seconds", "loss")},
        "accuracy over epochs": {"training": ("interval", "epoch", "accuracy"), "test top-5": ("evaluation", "epoch", "top5")},
        "accuracy over seconds": {"test top-1": ("evaluation", "seconds", "top1")},
        "learning rate over steps": {"learning rate": ("interval", "step", "rate")},
        "throughput over epochs": {"images/s": ("interval", "epoch", "images_per_second")},
        "share of a step spent waiting": {"waiting": ("interval", "epoch", "wait_share")},
        "overlap with backward": {"hidden": ("interval", "epoch", "overlapped_share")},
    }
    for title, lines in wanted.items():
        for name, (kind, x, y) in lines.items():
            rows = [row for row in ROWS if row["kind"] == kind]
            xs, ys, g = series(found[title])[name]
            assert xs == pytest.approx([row[x] for row in rows], rel=1e-5)
            assert ys == pytest.approx([row[y] for row in rows], rel=1e-5)
            (points,) = drawn(g)
            for point, row in zip(points, rows, strict=True):
                assert unscale(found[title], point) == pytest.approx((row[x], row[y]), rel=0.01, abs=1e-3), (title, name)


def test_the_parts_of_a_step_are_stacked():
    svg = plots(build([run()]))["where a step's time goes"]
    below = 0.0
    for part, seconds in (("compute", 0.02), ("input", 0.001), ("wait", 0.007), ("update", 0.002)):
        xs, ys, g = series(svg)[part]
        assert len(xs) == 12
        assert set(ys) == {seconds}
        (edge,) = g.iter("path")
        values = {round(unscale(svg, tuple(map(float, p.split())))[1], 4) for p in edge.get("d")[1:-2].split(" L")}
        assert values == {round(below, 4), round(below + seconds, 4)}
        below += seconds


def test_gaps_single_points_and_nothing_at_all():
    ys = (1.0, 2.0, None, 4.0, math.nan, 6.0, math.inf, 8.0, 9.0)
    svg = plots(plot_lines([Series("s", tuple(map(float, range(9))), ys)], title="t", x="x"))["t"]
    xs, told, g = series(svg)["s"]
    assert len(xs) == 9
    assert told == [1.0, 2.0, None, 4.0, None, 6.0, None, 8.0, 9.0]
    assert sorted(map(len, drawn(g))) == [1, 1, 2, 2]
    assert plot_lines([Series("s", (1.0,), (None,))], title="t", x="x") == ""
    assert plot_lines([], title="t", x="x") == ""
    assert plot_stack([1.0], [Series("s", (1.0,), (None,))], title="t", x="x", unit="ms") == ""
    assert plot_bars(["a"], [Series("s", (0.0,), (None,))], title="t", unit="ms") == ""
    single = plots(plot_lines([Series("s", (3.0,), (5.0,))], title="t", x="x"))["t"]
    assert unscale(single, drawn(series(single)["s"][2])[0][0]) == pytest.approx((3.0, 5.0), abs=0.02)


def test_a_batch_that_changes_is_drawn_as_steps():
    svg = plots(build([run()]))["batch size over steps"]
    (points,) = drawn(series(svg)["samples"][2])
    assert [unscale(svg, p) for p in points[4:8]] == [
        pytest.approx(v, abs=0.7) for v in ((25.0, 120.0), (30.0, 120.0), (30.0, 240.0), (35.0, 240.0))
    ]


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32), st.integers(MOST + 1, 3 * MOST), st.floats(0, 1))
def test_thinned_series_keep_their_order_their_peaks_and_nothing_else(seed, count, gaps):
    random = Random(seed)
    ys = [None if random.random() < gaps else random.gauss(0, 100) for _ in range(count)]
    whole = Series("s", tuple(map(float, range(len(ys)))), tuple(ys))
    few = thin(whole)
    assert len(few.xs) <= MOST
    assert list(few.xs) == sorted(set(few.xs))
    assert all(few.ys[i] == ys[int(x)] for i, x in enumerate(few.xs))
    there = [y for y in ys if y is not None]
    if there:
        assert {min(there), max(there)} <= set(few.ys)
    assert thin(few) == few


@given(st.floats(-1e9, 1e9), st.floats(1e-9, 1e9))
def test_ticks_are_round_equally_far_apart_and_enclose_the_values(low, size):
    high = low + size
    marks = ticks(low, high)
    assert 2 <= len(marks) <= 8 or size < 1e-6 * abs(low)
    if size >= 1e-6 * abs(low):
        step = marks[1] - marks[0]
        assert marks[0] <= low + 1e-6 * step
        assert marks[-1] >= high - 1e-6 * step
        assert [b - a for a, b in pairwise(marks)] == pytest.approx([step] * (len(marks) - 1), rel=1e-3)
        assert f"{step:.1e}"[:3] in ("1.0", "2.0", "2.5", "5.0")


@pytest.mark.parametrize(("low", "high"), [(0.001, 2.3), (1.0, 10.0), (3e-9, 4e5), (0.02, 0.03)])
def test_decades_enclose_the_values(low, high):
    marks = decades(low, high)
    assert marks[0] <= low
    assert marks[-1] >= high
    assert 2 <= len(marks) <= 8
    scale = AxisScale(marks[0], marks[-1], 0.0, 1.0, log=True)
    assert 0.0 <= scale(low) < scale(high) <= 1.0


# ---- runs as they come -------------------------------------------------------------------------------------------------------


def save(directory, rows=ROWS, config=None, environment=ENVIRONMENT):
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config or {"name": "digits", "epochs": 6}))
    if environment is not None:
        (directory / "environment.json").write_text(json.dumps(environment))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def test_a_run_that_was_killed_has_a_page_that_says_so(tmp_path):
    directory = save(tmp_path / "r", ROWS[:-1])
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "interval", "step": 65, "lo')
    write_report([directory], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert NO_END in text
    assert len(series(plots(text)["loss over epochs"])["training"][0]) == 12
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["report.html"]


def test_a_run_that_was_resumed_has_not_ended_by_its_first_end():
    stopped = {**END, "why": "stopped"}
    assert run(rows=(*ROWS[:-1], stopped)).why == "stopped on request"
    assert run(rows=(*ROWS[:-1], stopped, START)).why == NO_END
    assert run(rows=(*ROWS[:-1], stopped, START, END)).why == "complete"


@pytest.mark.parametrize("rows", [(), (START,), (START, interval(5, loss=None, times=None, rate="x"), evaluation(1, top1=None))])
def test_a_run_with_little_in_it_has_a_page(tmp_path, rows):
    text = build(read_runs([save(tmp_path / "r", rows, environment=None)]))
    assert "Nothing recorded." in text
    assert not re.search(r"\b(nan|None|inf)\b", Tags(text).text)


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(ReportError, match="no such directory"):
        read_run(tmp_path / "nowhere", "n")
    with pytest.raises(ReportError, match=r"no config\.json"):
        read_run(tmp_path, "n")
    damaged = save(tmp_path / "r")
    with pytest.raises(ReportError, match="named twice"):
        read_runs([damaged, damaged])
    (damaged / "environment.json").write_text("[")
    with pytest.raises(ReportError, match=r"environment\.json"):
        read_run(damaged, "n")


# ---- what the page says ------------------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    """All tags with their attributes, and the text outside of style and script."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.open = [], "", []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "line", "circle", "rect", "path", "polygon"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag in self.open:
            assert self.open.pop() == tag
        else:
            assert tag in ("circle", "rect", "line")

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data + "\n"


def test_facts_and_what_was_changed_from_the_recipe():
    config = {"name": "digits", "epochs": 6, "optimizer": {"momentum": 0.5}, "rate": {"steps": []}}
    text = Tags(build([run(config=config)])).text
    for words in ("98.44 %", "16.0 s", "60 steps", "complete", "ring(2)", "changed from recipe digits"):
        assert words in text
    changed = text.partition("changed from recipe digits")[2].partition("all settings")[0].split("\n")
    assert [word for word in changed if word.strip()][:8] == [
        "this run", "recipe digits",
        "epochs", "6", str(digits.epochs),
        "optimizer.momentum", "0.5", str(digits.optimizer.momentum),
    ]  # fmt: skip
    assert "changed from the defaults" in Tags(build([run(config={"name": "mine"})])).text


def test_several_runs_are_overlaid_compared_and_told_apart(tmp_path):
    paths = [
        save(tmp_path / a / "run", config={"name": "d", "rate": {"peak": peak}, "batch": 7})
        for a, peak in (("x", 0.1), ("y", 0.3))
    ]
    text = build(read_runs(paths))
    assert list(series(plots(text)["learning rate over steps"])) == ["x/run", "y/run"]
    colours = [g.get("class").split()[-1] for _, _, g in series(plots(text)["learning rate over steps"]).values()]
    assert colours == ["c0", "c1"]
    told = Tags(text).text
    assert "2 runs compared" in told
    differences = told.partition("differences")[2].partition("all settings")[0]
    assert "rate.peak" in differences
    assert "0.3" in differences
    assert "batch" not in differences
    assert "equal settings" in Tags(build([run("a"), run("b")])).text
    assert len(plots(text)["where a step's time goes"].findall("rect")) == 8


def test_stragglers_are_listed_once_with_the_worst():
    slow = [
        {"kind": "straggler", "step": s, "seconds": 1.0, "rank": 3, "cause": "input", "factor": f}
        for s, f in ((10, 2.0), (20, 4.5))
    ]
    slow.append({"kind": "straggler", "step": 30, "seconds": 1.0, "rank": None, "cause": "network", "factor": 0.7})
    text = Tags(build([run(rows=(*ROWS, *slow))])).text
    listed = [word for word in text.partition("Stragglers")[2].partition("Communication")[0].split("\n") if word]
    assert listed[5:] == [
        "rank 3",
        "input",
        "4.5 times the others",
        "2",
        "10 to 20",
        "network",
        "network",
        "70% of the step",
        "1",
        "30 to 30",
    ]
    assert "Stragglers" not in Tags(build([run()])).text


def test_nothing_in_a_run_becomes_a_tag_a_script_or_an_attribute():
    evil = "\"'><script>alert(1)</script><img src=x onerror=alert(2)>&amp;"
    environment = dict.fromkeys(ENVIRONMENT, evil) | {
        "versions": {evil: evil},
        "schedule": {"name": evil, "text": to_text(torus(2, 2)).replace("torus(2x2)", "<b>")},
    }
    slow = {"kind": "straggler", "step": 1, "rank": evil, "cause": evil, "factor": 2.0}
    rows = (*ROWS[:-1], slow, {**END, "why": evil})
    trace = {"traceEvents": [{"ph": "X", "cat": "phase", "name": evil, "pid": 0, "tid": 0, "ts": 0, "dur": 5}]}
    config = {"name": evil, evil: {evil: [evil]}}
    for runs in ([run(evil, rows, config, environment, trace)], [run(evil, rows, config, environment, trace), run("b")]):
        text = build(runs)
        found = Tags(text)
        assert found.open == []
        assert evil in found.text
        tags = [tag for tag, _ in found.tags]
        assert tags.count("script") == 1
        assert not {"img", "b"} & set(tags)
        assert not [name for _, attributes in found.tags for name in attributes if name.startswith("on")]


EVIL = "\"'></title></svg><meta http-equiv=refresh content='0;url=http://x'><form action=http://x><input></form><a href=x>\x1b[2J"


def poisoned(value):
    """Plain data with every text in it, keys as well, followed by something evil; words that the page looks for stay."""
    known = {"X", "phase", "all-reduce", "interval", "evaluation", "start", "end", "straggler", "allreduce"}
    if isinstance(value, dict):
        return {key: poisoned(inner) for key, inner in value.items()} | {EVIL: EVIL}
    if isinstance(value, list | tuple):
        return [poisoned(inner) for inner in value]
    return f"{value}{EVIL}" if isinstance(value, str) and value not in known else value


def shape(page):
    """Every element of a page with the names of its attributes, in order: what a browser makes of it."""
    return [(tag, sorted(attributes)) for tag, attributes in Tags(page).tags]


def test_a_page_of_evil_names_has_no_element_that_a_page_of_good_names_lacks():
    """Every place at once, also those that nobody thought of: escaped where it is drawn, it changes nothing but text."""
    trace = {
        "traceEvents": [{"ph": "X", "cat": "phase", "name": "forward", "pid": rank, "ts": 0, "dur": 5} for rank in range(10)]
    }
    trace["traceEvents"] += [{"ph": "X", "cat": "phase", "name": "x", "pid": pid, "ts": 0, "dur": 5} for pid in (EVIL, None, [1])]
    slow = {"kind": "straggler", "step": 1, "rank": 1, "cause": "input", "factor": 2.0}
    good = [[*ROWS[:-1], slow, END], {"name": "x", "x": {"y": ["z"]}}, ENVIRONMENT, trace]
    evil = [poisoned(part) for part in good]
    evil[2]["schedule"] = {"name": EVIL, "text": to_text(replace(ring(2), name=EVIL)), "seats": EVIL}
    several = [run("b"), run("c")]
    for others in ([], several):
        one, other = (build([run(name, *parts), *others]) for name, parts in (("a", good), (f"a{EVIL}", evil)))
        wanted = shape(one)
        found = shape(other)
        assert {tag for tag, _ in found} == {tag for tag, _ in wanted}
        assert {str(part) for part in found} == {str(part) for part in wanted}
        assert [part for part in found if part[0] in ("meta", "form", "a", "input", "script")] == [
            part for part in wanted if part[0] in ("meta", "script")
        ]
        assert "\x1b" not in other
        assert "http-equiv=refresh" in Tags(other).text


def test_the_page_loads_nothing_and_allows_only_its_own_script():
    text = build([run()])
    found = Tags(text)
    assert not [value for _, attributes in found.tags for name, value in attributes.items() if name in ("src", "href", "srcset")]
    assert not re.search(r"@import|url\(", text)
    (policy,) = [a["content"] for tag, a in found.tags if tag == "meta" and a.get("http-equiv") == "Content-Security-Policy"]
    script = re.search(r"<script>(.*)</script>", text, re.DOTALL).group(1)
    own = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    only_own = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{own}'"
    assert policy == f"{only_own}; form-action 'none'; base-uri 'none'"


# ---- pictures ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schedule", [ring(2), ring(3), tree(4), torus(5, 1), torus(2, 4), halving_doubling(8)], ids=lambda s: s.name
)
def test_every_message_of_a_schedule_is_an_arrow_between_its_ranks(schedule):
    pictures = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", draw_schedule(schedule), re.DOTALL)]
    assert len(pictures) == (1 if schedule.lowered else 2)
    rows = {text.text: float(text.get("y")) - 4 for text in pictures[-1].findall("text") if text.text.startswith("rank")}
    assert len(rows) == schedule.world
    arrows = sorted(
        (float(g.find("line").get("y1")), float(g.find("polygon").get("points").split()[0].split(",")[1]))
        for g in pictures[-1].findall("g")
    )
    moves = [op for op in lower(schedule).ops() if isinstance(op, Move)]
    assert arrows == sorted((rows[f"rank {op.src}"], rows[f"rank {op.dst}"]) for op in moves)


@pytest.mark.parametrize("schedule", [torus(2, 2), torus(2, 3), torus(4, 4), hierarchical(2, 3)], ids=lambda s: s.name)
def test_groups_of_one_step_are_told_apart(schedule):
    """No line of a group passes through a rank of another one at the same place."""
    picture = ElementTree.fromstring(re.search(r"<svg.*?</svg>", draw_schedule(schedule), re.DOTALL).group())
    width = float(picture.get("viewBox").split()[2])
    drawn = []
    for g in picture.findall("g"):
        dots = [(float(dot.get("cx")), float(dot.get("cy"))) for dot in g.findall("circle")]
        drawn.append((dots[0][0], min(y for _, y in dots), max(y for _, y in dots)))
        assert len({x for x, _ in dots}) == 1
        assert 58 < dots[0][0] < width - 5
    assert len(drawn) == len(list(schedule.ops()))
    for (x, low, high), (other, least, most) in combinations(drawn, 2):
        assert abs(x - other) >= 10 or high < least or most < low


def test_zeros_lie_at_the_bottom_of_their_axis():
    for most in (None, 1.0):
        svg = plots(plot_lines([Series("s", (1.0, 2.0), (0.0, 0.0))], title="t", x="x", zero=True, most=most, unit="percent"))[
            "t"
        ]
        assert (svg.get("data-y0"), svg.get("data-y1")) == ("0", "1")


def test_schedules_of_large_worlds_and_of_one_rank():
    assert "<pre>" in draw_schedule(ring(40))
    assert "no other to communicate with" in draw_schedule(ring(1))


def test_a_timeline_has_its_spans_in_proportion_and_few_ranks():
    events = [
        {"ph": "X", "cat": "phase", "name": "forward", "pid": r, "tid": 0, "ts": 0, "dur": 1000 * (r + 1)} for r in range(10)
    ]
    svg = ElementTree.fromstring(re.search(r"<svg.*</svg>", draw_timeline({"traceEvents": events})).group())
    widths = [float(rect.get("width")) for rect in svg.iter("rect")]
    assert widths == pytest.approx([widths[0] * (r + 1) for r in range(8)], abs=0.1)
    assert "first 8 of 10" in draw_timeline({"traceEvents": events})
    assert draw_timeline({}) == ""


# ---- in a browser ------------------------------------------------------------------------------------------------------------

# where the plots are, and the colours in which the browser draws their lines
PROBE = """<script>document.body.dataset.probe = JSON.stringify([...document.querySelectorAll("svg.plot")].map((svg) => ({
  title: svg.getAttribute("aria-label"),
  box: (({x, y, width, height}) => [x, y, width, height])(svg.getBoundingClientRect()),
  colours: [...svg.querySelectorAll(".series:not(.faint)")].map((g) => getComputedStyle(g.querySelector("path")))
    .map((style) => style.fill === "none" ? style.stroke : style.fill),
  overflows: document.documentElement.scrollWidth > innerWidth,
})))</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")
@pytest.mark.parametrize(("theme", "setting", "background"), [("dark", 0, (16, 19, 24)), ("light", 1, (246, 247, 249))])
def test_a_browser_shows_every_plot_in_its_colours(tmp_path, theme, setting, background):
    image = pytest.importorskip("PIL.Image")
    text = build([run(trace={"traceEvents": []})])
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text).replace("</body>", PROBE)
    (tmp_path / "page.html").write_text(text)
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
            "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
            f"--user-data-dir={tmp_path}/profile",
            f"--blink-settings=preferredColorScheme={setting}", "--window-size=1200,2600", f"--screenshot={tmp_path}/page.png",
            "--dump-dom", f"file://{tmp_path}/page.html",
        ],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    found = json.loads(unescape(re.search(r'data-probe="([^"]*)"', done.stdout).group(1)))
    shot = image.open(tmp_path / "page.png").convert("RGB")
    assert shot.getpixel((3, 3)) == background
    assert len(found) == len(plots(text)) >= 9
    for plot in found:
        x, y, width, height = map(round, plot["box"])
        assert width > 400
        assert not plot["overflows"]
        seen = {colour: count for count, colour in shot.crop((x, y, x + width, y + height)).getcolors(1 << 24)}
        for colour in plot["colours"]:
            assert seen.get(tuple(map(int, re.findall(r"\d+", colour))), 0) > 30, (plot["title"], colour)
        assert (138, 122, 31) not in seen, "the control: a colour of no series of this page"


# ---- a plan beside what was measured -------------------------------------------------------------------------------------------

PLAN = {
    "model": "resnet18",
    "batch": 120,
    "error": 0.11,
    "step_s": 0.1,
    "samples_per_s": 1200.0,
    "run": {"schedule": "torus:2x2"},
    "terms_s": {
        "computing samples": 0.03,
        "computing, whatever the batch": 0.01,
        "optimizer": 0.002,
        "waiting for the slowest host": 0.058,
    },
}


def test_a_run_that_followed_a_plan_shows_prediction_and_measurement(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text(json.dumps(interval(10, images_per_second=600.0, batch=120)) + "\n")
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    (table,) = prediction([read_run(tmp_path, "planned")])
    rows = {row[0].strip().split(",")[0]: row[1:] for row in table.rows}
    assert rows["step"] == ("100.0", "200.0", "2.00")
    assert rows["computing"] == ("40.0", "20.0", "0.50")
    assert rows["waiting for input"] == ("58.0", "8.0", "0.14")
    assert rows["images per second"] == ("1,200.0", "600.0", "0.50")
    assert "torus:2x2" in table.title
    assert "Predicted and measured" in build([read_run(tmp_path, "planned")])


def test_a_run_without_a_plan_or_with_half_of_one_is_shown(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert not list(prediction([read_run(tmp_path, "free")]))
    (tmp_path / "plan.json").write_text("{}")
    (table,) = prediction([read_run(tmp_path, "half")])
    assert all(cell == "–" for row in table.rows for cell in row[1:])
