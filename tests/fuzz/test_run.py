"""What describes a run: its settings, its rows, its trace, and the page that is made of them."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fuzz.harness import Parser, blocks, fuzz
from tests.fuzz.mutate import JSON, TEXT

from phalanx.cli.show_lr import draw, headline, moments, tabulate
from phalanx.cli.train import load
from phalanx.schedule import ring, to_text
from phalanx.train.config import RunConfig, override, paths, plain
from phalanx.train.report import ReportError, build
from phalanx.train.report.run import read_run
from phalanx.train.report.timeline import draw_timeline, name_travels
from phalanx.train.rows import Rows, read_rows
from phalanx.train.trace import Span, to_chrome

# ---- settings ------------------------------------------------------------------------------------------------------------------


def as_text(value):
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


RECIPE = load("digits")
ALL = [f"{path}={as_text(value)}" for path, value in paths(RunConfig(name="run"))]
SETTINGS = (
    b"epochs=5\nbatch=60",
    b"stages=2x32,3x64x2\nepochs=5\nrate.decay=cosine\nrate.warmup=1.5",
    b"data.mean=0.5,0.5\ndata.std=(0.1, 0.2)\nmodel.precision=bfloat16\ntarget=0.9\nmicro_batch=none",
    b"optimizer.name=lars\noptimizer.momentum_rule=noise\ncomm.wire=float16",
    *(line.encode() for line in ALL if "=None" not in line),
)


def read_settings(data):
    """As `phalanx show-lr RECIPE --set ...` does."""
    given = [line.partition("=") for line in data.decode("utf-8", "replace").split("\n")]
    config = override(RECIPE, {path.strip(): text.strip() for path, _, text in given})
    samples = None if len(data) % 2 else 1797
    points = moments(config, samples, 10)
    headline(config, samples)
    draw(points, 30)
    tabulate(points)
    json.dumps(plain(config), allow_nan=False)


# ConfigError, and those of a course that contradicts itself: the command line makes one line of each
SETTING = Parser("settings", read_settings, (ValueError,), SETTINGS, TEXT)


@pytest.mark.parametrize("cases", blocks(0.5))
def test_settings(cases):
    assert set(fuzz(SETTING, cases)) == {"accepted", "refused"}


def test_every_setting_reads_back_equal():
    config = RunConfig(name="run")
    assert override(config, dict(line.split("=", 1) for line in ALL)) == config


# ---- rows ----------------------------------------------------------------------------------------------------------------------

ROWS = [
    {"kind": "start", "step": 0, "ranks": 2, "seconds": 0.0},
    {"kind": "interval", "step": 10, "epoch": 0.5, "seconds": 1.5, "loss": 2.25, "accuracy": 0.4, "rate": 0.1, "batch": 120,
     "images_per_second": 800.0, "wait_share": 0.1, "overlapped_share": 0.5, "groups": 3,
     "times": {"input": 0.01, "compute": 0.1, "wait": 0.01, "update": 0.005}},
    {"kind": "interval", "step": 20, "epoch": 1.0, "seconds": 3.0, "loss": 0.002, "accuracy": 0.9, "rate": 0.01, "batch": 120},
    {"kind": "evaluation", "step": 20, "epoch": 1.0, "seconds": 3.5, "loss": 0.5, "top1": 0.9, "top5": 1.0, "spread": 0.1},
    {"kind": "straggler", "step": 20, "rank": 1, "cause": "input", "factor": 2.0},
    {"kind": "start", "step": 20, "ranks": 4, "seconds": 3.5},
    {"kind": "end", "why": "epochs", "step": 30, "seconds": 5.0},
]  # fmt: skip
LINES = "\n".join(map(json.dumps, ROWS)).encode()


@pytest.mark.parametrize("cases", blocks())
def test_rows(memory, cases):
    path = memory / "metrics.jsonl"

    def read(data):
        path.write_bytes(data)
        rows = read_rows(path)
        kept = Rows(path, keep_to_step=20)
        kept.close()
        assert len(read_rows(path)) <= len(rows)

    seeds = (LINES, *(json.dumps(row).encode() for row in ROWS))
    assert set(fuzz(Parser("rows", read, (), seeds, (*TEXT, *JSON)), cases)) == {"accepted"}


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
rows = st.lists(
    st.dictionaries(st.text(), st.recursive(scalars, lambda inner: st.lists(inner, max_size=3), max_leaves=5)), max_size=5
)


@settings(max_examples=40, deadline=None)
@given(rows)
def test_rows_read_back_equal(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("rows") / "metrics.jsonl"
    file = Rows(path)
    for row in rows:
        file.write(row)
    file.close()
    assert read_rows(path) == rows


# ---- the trace and the page ----------------------------------------------------------------------------------------------------

SPANS = [
    Span("step", "step 3", 1.0, 1.5, 3),
    Span("phase", "forward", 1.0, 1.2, 3),
    Span("phase", "backward", 1.2, 1.4, 3),
    Span("all-reduce", "group 0", 1.3, 1.45, 3, 4096),
]
TRACE = to_chrome([SPANS, SPANS])


def read_trace(data):
    """As the page has it: read as an object, or not at all; whatever the object holds, a picture comes out, or none."""
    try:
        trace = json.loads(data)
    except (ValueError, RecursionError):
        return
    if isinstance(trace, dict):
        assert "<script" not in draw_timeline(trace)
        name_travels(trace)


@pytest.mark.parametrize("cases", blocks())
def test_trace(cases):
    parser = Parser("trace", read_trace, (), (json.dumps(TRACE).encode(),), JSON)
    assert set(fuzz(parser, cases)) == {"accepted"}


@pytest.mark.parametrize("cases", blocks(0.05, least=200))
def test_page(memory, cases):
    files = ("config", "environment", "trace", "plan")

    def read(data):
        """Each line is a file; the rest are rows."""
        lines = data.split(b"\n")
        for name, line in zip(files, lines):
            (memory / f"{name}.json").write_bytes(line)
        (memory / "metrics.jsonl").write_bytes(b"\n".join(lines[len(files) :]))
        assert build([read_run(memory, "run")]).startswith("<!doctype html>")

    environment = {"date": "2026-11-17T00:00:00+00:00", "host": "h", "cores": 2, "device": "cpu", "ranks": 2, "hosts": 1,
                   "versions": {"torch": "2.13"}, "command": ["phalanx", "train"],
                   "schedule": {"name": "ring(2)", "text": to_text(ring(2)), "seats": "rank"}}  # fmt: skip
    plan = {
        "model": "m",
        "batch": 120,
        "run": {"schedule": "ring:2"},
        "step_s": 0.1,
        "terms_s": {"optimizer": 0.01},
        "error": 0.1,
    }
    content = [plain(RunConfig(name="digits")), environment, TRACE, plan]
    seed = "\n".join(map(json.dumps, content)).encode() + b"\n" + LINES

    def one_line(rng, data, seeds):
        """One file or row changed as JSON."""
        found = data.split(b"\n")
        at = rng.randrange(len(found))
        found[at] = rng.choice(JSON)(rng, found[at], seeds)
        return b"\n".join(found)

    assert set(fuzz(Parser("page", read, (ReportError,), (seed,), (one_line,)), cases)) == {"accepted", "refused"}
