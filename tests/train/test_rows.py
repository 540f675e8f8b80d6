"""Rows on disk: whole lines, whatever killed the writer; and only those of what happened."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long import times

from phalanx.train.rows import Rows, read_rows, write_json

ROWS = [
    {"kind": "start", "step": 0},
    {"kind": "interval", "step": 1, "loss": 0.5},
    {"kind": "evaluation", "step": 2, "top1": 0.25},
    {"kind": "interval", "step": 3, "loss": 0.25},
    {"kind": "end", "steps": 3, "why": "stopped"},
]


def write(path, told, **options):
    rows = Rows(path, **options)
    for row in told:
        rows.write(row)
    rows.close()


def test_what_is_written_is_read(tmp_path):
    write(tmp_path / "new" / "rows", ROWS)
    assert read_rows(tmp_path / "new" / "rows") == ROWS
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["rows"]


def test_a_row_is_on_disk_before_the_next(tmp_path):
    rows = Rows(tmp_path / "rows")
    rows.write(ROWS[0])
    assert read_rows(tmp_path / "rows") == ROWS[:1]
    rows.close()


def test_a_new_run_begins_an_empty_file(tmp_path):
    write(tmp_path / "rows", ROWS)
    write(tmp_path / "rows", ROWS[:1])
    assert read_rows(tmp_path / "rows") == ROWS[:1]


@pytest.mark.parametrize(("step", "kept"), [(0, 1), (1, 2), (2, 3), (3, 4), (9, 4)])
def test_a_resumed_run_keeps_what_happened(tmp_path, step, kept):
    write(tmp_path / "rows", ROWS)
    write(tmp_path / "rows", [{"kind": "start", "step": step}], keep_to_step=step)
    assert read_rows(tmp_path / "rows") == [*ROWS[:kept], {"kind": "start", "step": step}]


@settings(max_examples=times(60, seldom=24), deadline=None)
@given(cut=st.integers(0, 300))
def test_cut_anywhere(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("cut") / "rows"
    write(path, ROWS)
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    lines = whole[:cut].count(b"\n") + (cut < len(whole) and whole[cut : cut + 1] == b"\n")
    assert read_rows(path) == ROWS[:lines]
    write(path, [ROWS[0]], keep_to_step=10)
    assert read_rows(path) == [*(row for row in ROWS[:lines] if row["kind"] != "end"), ROWS[0]]


def test_no_nan_in_json(tmp_path):
    write(tmp_path / "rows", [{"loss": float("nan"), "times": {"input": float("inf")}, "list": [1.0, float("-inf")]}])
    assert json.loads((tmp_path / "rows").read_text(), parse_constant=pytest.fail) == {
        "loss": None,
        "times": {"input": None},
        "list": [1.0, None],
    }
    write_json(tmp_path / "value.json", {"a": (1, float("nan"))})
    assert json.loads((tmp_path / "value.json").read_text(), parse_constant=pytest.fail) == {"a": [1, None]}


def test_nothing_is_there_yet(tmp_path):
    assert read_rows(tmp_path / "nowhere") == []
