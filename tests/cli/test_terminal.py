"""Where the command line prints: output that is full, closed, ASCII or a terminal, and names that hold escape sequences."""

import io
import subprocess
import sys

import pytest

from phalanx.cli.main import main
from phalanx.cli.terminal import Output, OutputError
from phalanx.schedule import ScheduleError, ring, to_json, to_text

ODD = "\x1b]0;title\x07\x1b[2J\nphalanx: all is well\r\u202e\x9b31m"


def run(words, **options):
    """`phalanx WORDS` in a shell, for its redirections. Its streams are buffered, as they are for most users."""
    command = f"unset PYTHONUNBUFFERED; exec {sys.executable} -m phalanx {words}"
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120, **options)


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ("show ring:4 >/dev/full", 1, "phalanx: cannot write to standard output: No space left on device\n"),
        ("verify ring:4 >&-", 1, "phalanx: cannot write to standard output: it is closed\n"),
        ("--help >&-", 1, "phalanx: cannot write to standard output: it is closed\n"),
        ("show ring:4 >/dev/full 2>&-", 1, ""),
        ("show nonsense 2>/dev/full", 2, ""),
    ],
)
def test_output_that_takes_nothing_is_one_line(words, code, told):
    done = run(words)
    assert (done.returncode, done.stderr) == (code, told)


def test_what_an_encoding_lacks_is_written_out():
    done = run("show 'ring:3' --lower", env={"PYTHONIOENCODING": "ascii", "PYTHONPATH": ":".join(sys.path)})
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\u2192" in done.stdout  # an arrow
    assert done.stdout.isascii()


@pytest.mark.parametrize("write", [to_text, to_json])
@pytest.mark.parametrize("words", [["show"], ["show", "--lower"], ["verify"], ["show", "--text"], ["show", "--json"]])
def test_names_of_a_file_do_not_move_the_cursor(tmp_path, capsys, write, words):
    from dataclasses import replace

    odd = replace(ring(2), name=ODD, steps=tuple(replace(step, label=ODD) for step in ring(2).steps))
    (tmp_path / "mine").write_text(write(odd))
    assert main([*words, str(tmp_path / "mine")]) == 0
    out, err = capsys.readouterr()
    assert "title" in out
    assert not set(out + err) & set("\x1b\x07\r\u202e\x9b")
    assert not [line for line in out.splitlines() if line.startswith("phalanx: all is well")], "nor add a line of ours"


def test_nor_does_what_is_wrong_with_it(tmp_path, capsys):
    (tmp_path / "mine").write_text(
        to_json(ring(2)).replace("ring(2)", "\\u001b[2J\\nphalanx: fine").replace('"root": 0', '"root": 7')
    )
    assert main(["verify", str(tmp_path / "mine")]) == 1
    out, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert "\x1b" not in err
    assert out == ""


def test_an_output_keeps_text_and_passes_our_own_sequences():
    below = io.StringIO()
    output = Output(below, raises=True)
    print("a\tb\nc", file=output)
    output.own.write("\r\x1b[K")
    output.writelines(["\x1b", "é–→"])
    output.flush()
    assert below.getvalue() == "a\tb\nc\n\r\x1b[K\\x1bé–→"
    assert not output.isatty()


def test_an_output_raises_once_it_is_closed_and_only_if_it_should():
    below = io.StringIO()
    below.close()
    with pytest.raises(OutputError, match="cannot write to standard output"):
        print("x", file=Output(below, raises=True))
    print("x", file=Output(below, raises=False))
    print("x", file=Output(None, raises=False))
    assert not issubclass(OutputError, OSError | ScheduleError)
