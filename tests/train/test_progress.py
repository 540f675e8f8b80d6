"""The line that a person watches: it fits the terminal, is redrawn in place there, and is plain words in a file."""

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from tests.train.runs import TINY

from phalanx.train.banner import banner, data_facts, describe_batch, name_backend, run_facts
from phalanx.train.columns import cells, choose, column, head
from phalanx.train.progress import Progress, duration, evaluation_values, line, show_progress
from phalanx.train.trainer import Result

ROW = {
    "step": 123,
    "epoch": 12.34,
    "rate": 0.0466667,
    "batch": 120,
    "seconds": 3.0,
    "loss": 0.02134,
    "accuracy": 0.9921,
    "images_per_second": 2335.4,
    "wait_share": 0.123,
}
RESULT = Result(epochs=30, steps=330, found={"top1": 0.9917, "top5": 1.0, "loss": 0.03}, seconds=8.21, why="epochs")


class Terminal(io.StringIO):
    """What says that it is one."""

    def isatty(self):
        return True


@pytest.mark.parametrize("width", [10, 40, 60, 80, 120, 300])
def test_the_line_fits_and_loses_the_least_important_first(width):
    text = line(ROW, 2, 30, 65.0, width)
    assert len(text) <= width
    whole = line(ROW, 2, 30, 65.0, 1000)
    without_bar = re.sub(" [━─]+", "", whole)
    assert (whole if "━" in text else without_bar).startswith(text)
    for part in (
        "epoch 12.3/30",
        "left   1:05 min",
        "loss  0.0213",
        "accuracy  99.2%",
        "images/s    2,335",
        "rate  0.0467",
        "waiting  12%",
    ):
        assert part in whole
    assert ("left" in text) == (width >= 40), "a narrow terminal keeps the time that is left"
    assert ("loss" in text) == (width >= 60)
    assert ("rate" in text) == (width >= 120)


LANGUAGE = {"kind": "interval", "step": 7, "epoch": 0.5, "loss": 1.25, "perplexity": 3.4903, "bits_per_byte": 1.8, "rate": 1e-3}


def test_what_a_task_measures_comes_before_the_rest():
    text = line(LANGUAGE | {"tokens_per_second": 12345.6}, 1, 2, 9.0, 1000)
    assert re.sub(" +", " ", text.split("─  ")[1]) == (
        "left 9.0 s loss 1.2500 perplexity 3.49 bits per byte 1.8 tokens/s 12,346 rate 0.001 step 7"
    )


def test_one_rank_waits_for_nobody():
    assert "waiting" not in line(ROW, 1, 30, 65.0, 1000)


def test_the_bar_is_full_at_the_end():
    assert "─" not in line(ROW | {"epoch": 30.0}, 1, 30, 0.0, 100)
    assert "━" not in line(ROW | {"epoch": 0.1}, 1, 30, 0.0, 100)


def test_a_file_gets_a_line_per_evaluation_and_no_escapes():
    stream = io.StringIO()
    progress = show_progress(replace(TINY, epochs=30), stream)
    progress.interval(ROW, 2, 5.0)
    assert stream.getvalue() == ""
    progress.evaluation(3, {"loss": 0.1, "top1": 0.97, "top5": 1.0}, 61.0)
    progress.warn("rank 1 holds the others up")
    progress.evaluation(30, {"loss": 12.3456, "top1": 1.0, "top5": 1.0}, 3723.0)
    progress.end(RESULT, Path("runs/tiny"), Path("runs/tiny/report.html"))
    progress.close()
    assert stream.getvalue().splitlines() == [
        "epoch  test loss    top-1    top-5  train loss  images/s       time        left",
        " 3/30     0.1000   97.00%  100.00%      0.0213     2,335   1:01 min       5.0 s",
        "rank 1 holds the others up",
        "30/30    12.3456  100.00%  100.00%      0.0213     2,335  1:02:03 h       0.0 s",
        "done: test accuracy 0.9917 after 30 epochs, 330 steps, 8.2 s",
        "report: runs/tiny/report.html",
    ]


FOUND = {"top1": 0.97, "top5": 1.0, "loss": 0.1}


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("found", [FOUND, FOUND | {"spread": 1e-3}, {"loss": 1.25, "perplexity": 3.49, "bits_per_byte": 1.8}])
@pytest.mark.parametrize("left", [None, 5.0, 359999.0])
def test_a_table_fits_its_columns_are_aligned_and_the_time_left_stays(width, found, left):
    values = evaluation_values(7, 90, found, ROW, 3599.0, left)
    keys = choose(values, width - 1)
    titles, row = head(keys, values), cells(keys, values)
    assert len(titles) == len(row) <= width - 1
    assert titles.split()[0] == "epoch"
    assert titles.endswith(" left")
    ends = [match.end() for match in re.finditer(r"\S+( \S+)*", titles)]
    assert all(row[end - 1] != " " and row[end : end + 1] in ("", " ") for end in ends), "each value ends below its title"
    assert column(next(iter(found.keys() - {"loss"}))).title in titles or width == 40
    if width == 120:
        assert len(keys) == len(values), "nothing is left out"


def test_titles_stand_above_numbers_that_are_longer_than_any_that_was_thought_of():
    values = evaluation_values(7, 10_000, {"loss": 1e12}, ROW, 3599.0, 1e9)
    keys = choose(values, 1000)
    assert len(head(keys, values)) == len(cells(keys, values))
    assert cells(keys, values).startswith("    7/10000")


def test_a_table_has_titles_once_and_again_if_the_terminal_changes(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    progress = show_progress(replace(TINY, epochs=30), stream)
    for epoch, columns in enumerate(("80", "80", "40", "40")):
        monkeypatch.setenv("COLUMNS", columns)
        progress.evaluation(epoch, FOUND, 1.0)
    lines = stream.getvalue().splitlines()
    assert [line.lstrip().startswith("epoch") for line in lines] == [True, False, False, True, False, False]
    assert max(map(len, lines[3:])) < 40


def test_a_terminal_is_redrawn_in_place(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    progress = show_progress(TINY, stream)
    progress.interval(ROW, 2, 5.0)
    progress.interval(ROW, 2, 5.0)  # too soon to be drawn again
    drawn = stream.getvalue()
    assert drawn.count("\r") == 1
    assert "\n" not in drawn
    assert len(re.sub(r"\x1b\[[0-9;]*[mK]|\r", "", drawn)) < 60
    progress.say("a line that stays")
    assert stream.getvalue()[len(drawn) :] == "\r\x1b[Ka line that stays\n"


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colours_only_where_they_are_wanted(monkeypatch, name, value):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(name, value)
    stream = Terminal()
    progress = show_progress(TINY, stream)
    progress.warn("slow")
    progress.interval(ROW, 2, 5.0)
    assert not re.search(r"\x1b\[[0-9;]*m", stream.getvalue())
    assert (name == "TERM") == ("\r" not in stream.getvalue())


@pytest.mark.parametrize(("why", "words"), [("target", "target reached"), ("stopped", "--resume")])
def test_why_it_ended(why, words):
    stream = io.StringIO()
    Progress(TINY, stream, live=False, colour=False).end(replace(RESULT, why=why, found={}), None)
    assert words in stream.getvalue()
    assert "nan" not in stream.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (59.94, "59.9 s"), (59.96, "1:00 min"), (185, "3:05 min"), (3599.6, "1:00:00 h"), (3723, "1:02:03 h")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


class Full(Terminal):
    """A terminal that takes nothing more."""

    def write(self, text):
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("stream", [Full(), None])
def test_a_training_does_not_end_because_nobody_can_watch_it(stream, capsys):
    progress = Progress(TINY, stream, live=stream is not None, colour=True)
    for _ in range(3):
        progress.interval(ROW, 2, 5.0)
        progress.warn("slow")
        progress.say("words")
    progress.end(RESULT, None)
    progress.close()
    assert capsys.readouterr().err.count("\n") == (stream is not None), "said once"


def test_what_is_said_holds_no_control_characters_but_our_own():
    stream = Terminal()
    progress = Progress(TINY, stream, live=True, colour=True)
    progress.warn("rank \x1b[2J1")
    progress.say("left out \x1b]0;x\x07")
    progress.end(RESULT, Path("runs/\x1b[31mx"))
    assert re.findall("\x1b[^a-zA-Z]*[a-zA-Z]", stream.getvalue()) == ["\x1b[33m", "\x1b[0m", "\x1b[1m", "\x1b[0m"]
    assert "rank \\x1b[2J1" in stream.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_the_banner_fits(width):
    facts = run_facts(
        replace(TINY, batch=4096, micro_batch=128),
        ranks=8,
        hosts=2,
        backend="gloo",
        schedule="hierarchical(2x4) of a name that is rather long for a terminal",
        out="runs/a-directory-with-a-name-that-nobody-wants-to-see-broken",
    ) | data_facts(parameters=25_557_032, samples=(1_281_167, 50_000))
    lines = banner("tiny", facts, width)
    assert lines[0] == "tiny"
    words = [line.split() for line in lines]
    assert all(len(line) <= width or len(split) <= 2 for line, split in zip(lines, words)), "only a word may be too long"
    text = " ".join(word for line in words for word in line)
    for part in (
        "model small_cnn",
        "ranks 8 on 2 hosts",
        "backend gloo",
        "schedule hierarchical(2x4) of a name",
        "batch 4,096, 512 per rank in 4 passes",
        "output runs/a-directory-with-a-name-that-nobody-wants-to-see-broken",
        "parameters 25,557,032",
        "samples 1,281,167 to train, 50,000 to test",
    ):
        assert part in text
    if width == 120:
        assert len(lines) == 1 + len(facts)


def test_a_batch_that_cannot_be_shared_is_shown_and_refused_later():
    assert describe_batch(replace(TINY, batch=121), 2) == "121"


@pytest.mark.parametrize(
    ("ranks", "device", "threads", "shares", "name"),
    [
        (1, "cpu", False, False, "none, one rank"),
        (2, "cpu", True, True, "threads of one process"),
        (2, "cuda", False, False, "NCCL"),
        (2, "cpu", False, True, "shared memory"),
        (2, "cpu", False, False, "gloo"),
    ],
)
def test_the_backend_by_name(ranks, device, threads, shares, name):
    assert name_backend(ranks=ranks, device=device, threads=threads, shares_memory=shares) == name


def test_a_terminal_without_the_letters_gets_their_numbers():
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Progress(TINY, file, live=False, colour=False).say("é–")
    assert file.buffer.getvalue() == b"\\xe9\\u2013\n"
