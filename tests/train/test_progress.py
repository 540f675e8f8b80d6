"""The line that a person watches: it fits the terminal, is redrawn in place there, and is plain words in a file."""

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from tests.train.runs import TINY

from phalanx.train.progress import Progress, duration, line, show_progress
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


@pytest.mark.parametrize("width", [10, 40, 80, 120, 300])
def test_the_line_fits_and_loses_the_least_important_first(width):
    text = line(ROW, 2, 30, 65.0, width)
    assert len(text) <= width
    whole = line(ROW, 2, 30, 65.0, 1000)
    assert whole.startswith(text)
    for part in (
        "epoch 12.3/30",
        "loss 0.0213",
        "accuracy 99.2%",
        "2,335 images/s",
        "left 1:05 min",
        "rate 0.0467",
        "waiting 12%",
    ):
        assert part in whole
    assert "1,168 images/s per rank" in whole
    assert ("rate" in text) == (width >= 120)


def test_one_rank_waits_for_nobody():
    assert not re.search("waiting|per rank", line(ROW, 1, 30, 65.0, 1000))


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
    progress.end(RESULT, Path("runs/tiny"))
    progress.close()
    assert stream.getvalue().splitlines() == [
        "epoch  3/30  train loss 0.0213  2,335 images/s  test loss 0.1000  top-1 97.00%  top-5 100.00%  1:01 min",
        "rank 1 holds the others up",
        "done: test accuracy 0.9917 after 30 epochs, 330 steps, 8.2 s; runs/tiny",
    ]


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


def test_a_terminal_without_the_letters_gets_their_numbers():
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Progress(TINY, file, live=False, colour=False).say("é–")
    assert file.buffer.getvalue() == b"\\xe9\\u2013\n"
