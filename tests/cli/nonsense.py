"""What people and broken programs put where a word, a number, a path or a file is wanted."""

import contextlib
import io
import json
import random
import re
import warnings

import pytest

from phalanx.cli.main import main

LONG = "9" * 400  # a number that no float holds
WORDS = (
    "", " ", "x", "-1", "0", "1.5", "nan", "inf", "-inf", "1e400", "1e-300", "1e300", LONG, "9" * 5000, "0x10", "1_000", "٣",
    "\x1b[31mred", "a\nb", "\udcff", "é\u202eb", "a" * 300, "/", ".", "..", "/dev/null/x", "nowhere/x",
    "torus:2x", "ring:" + LONG, "1@", "@", "1@x",
)  # fmt: skip
PATHS = ("", ".", "/", "..", "/dev/null/x", "nowhere/x", "a" * 300, "\udcff/x", "\x1b]0;title\x07", "a\nb/x")

DEEP = "[" * 100_000
BINARY = (b"", b"\n", b"\xff\xfe\x00", b"\x00" * 100, b"\x7fELF\x02", b"null", b"[]", b"{}", b'"text"', b"3", b"NaN", b"{", b"[1")

LEAVES = (
    None, True, -1, 0, 1.5, 1e308, -1e308, 1e-320, "x", "", "\x1b[31m\n", "\ud800", "<meta http-equiv=refresh content=0>",
    [], {}, [[]], [None],
    "RAW:Infinity", "RAW:-Infinity", "RAW:NaN", f"RAW:{LONG}", f"RAW:-{LONG}", f"RAW:0.{LONG}", "RAW:1e999",
    "RAW:" + "[" * 500 + "]" * 500,
)  # fmt: skip


def mutants(content, seed, most=60):
    """Texts that differ from `content` (JSON, JSON lines, or lines of words) in one place each; always the same for a seed."""
    chance = random.Random(seed)
    made = []
    try:
        rows = [json.loads(content)]
    except ValueError:
        try:
            rows = [json.loads(line) for line in content.splitlines()]
        except ValueError:
            rows = []
    for number, row in enumerate(rows):
        for path in places(row):
            for leaf in LEAVES:
                lines = [json.dumps(other) for other in rows]
                lines[number] = raw(json.dumps(replaced(row, path, leaf), ensure_ascii=False))
                made.append("\n".join(lines) + "\n")
            made.append("\n".join([*lines[:number], raw(json.dumps(replaced(row, path, ...))), *lines[number + 1 :]]) + "\n")
    if not rows:
        words = content.split(" ")
        odd = ("", "x", "-1", "1" + LONG, '"\x1b[31m"', '"\\u001b[31m\\n"', '"\\ud800"', "1/0", "0:9:0", "[" * 2000)
        these = range(min(len(words), 20))
        made += [" ".join([*words[:place], leaf, *words[place + 1 :]]) for place in these for leaf in odd]
        made += [content.replace("\n", end, 3) for end in ("\r", "\n\n", "\x00", "\u2028")]
    chance.shuffle(made)
    return made[:most]


def places(value, at=()):
    """The path of every value inside of a value, lists by their first two."""
    yield at
    inside = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, inner in inside:
        yield from places(inner, (*at, key))


def replaced(value, path, leaf):
    """`value` with another one at `path`; `...` takes it away."""
    if not path:
        return None if leaf is ... else leaf
    key, *rest = path
    copy = dict(value) if isinstance(value, dict) else list(value)
    if leaf is ... and not rest:
        del copy[key]
    else:
        copy[key] = replaced(value[key], rest, leaf)
    return copy


def raw(text):
    """What `json.dumps` does not write: the words behind RAW: without their quotes."""
    head, *others = text.split('"RAW:')
    return head + "".join(part.replace('"', "", 1) for part in others)


# ---- command lines -------------------------------------------------------------------------------------------------------------

CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\ud800-\udfff]")
PLAN = ["plan", "--cluster", "lab", "--ranks", "1", "--batch", "8", "--rate", "300@8", "--group", "1", "--algorithm", "ring"]

# A line for each verb that is right, or that ends soon for another reason than the option to be tried.
LINES = {
    "train": ["train", "digits", "--set", "data.source=imagefolder:nowhere"],  # refused when all else was looked at
    "report": ["report", "run"],
    "show-lr": ["show-lr", "digits", "--samples", "100", "--set", "epochs=2"],
    "plan": PLAN,
    "bench allreduce": ["bench", "allreduce", "--ranks", "1000"],  # more than it starts
    "bench gossip": ["bench", "gossip", "--ranks", "1000"],
    "bench train": ["bench", "train", "--ranks", "1000"],
    "selftest": ["selftest", "--ranks", "1000"],
    "run": ["run", "--ranks", "2", "nowhere.py"],  # refused when all else was looked at
    "show": ["show", "ring:3"],
    "verify": ["verify", "ring:3"],
    "synth": ["synth", "--cluster", "nowhere.fabric"],  # refused when all else was looked at
    "pack": ["pack", "imagefolder:nowhere", "shard-%d.tar"],
    "export": ["export", "run", "model.pt"],
}
tried = {"lines": 0, "wrong": 0}


def say(argv):
    """Exit code and standard error of a command line; it raises nothing."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        code = main(argv)
    assert not warned, (argv, [str(warning.message) for warning in warned])  # they would be lines, too
    return code, err.getvalue(), out.getvalue()


def check(argv, *, codes=(0, 1, 2)):
    """One line for what is wrong, no escape sequence in anything."""
    code, err, out = say(argv)
    shown = [word if len(word) < 40 else f"{word[:40]}..." for word in argv]
    assert code in codes, (shown, code, err)
    assert not CONTROLS.search(err + out), (shown, err, out)
    assert "Traceback" not in err, shown
    if code:
        assert re.fullmatch(r"phalanx: .{10,2010}\n", err), (shown, code, err)
    else:
        assert err == "" or err.startswith(("trace: ", "page: ", "schedule: ")), (shown, err)
    tried["lines"] += 1
    tried["wrong"] += bool(code)


@pytest.fixture
def run_directory(tmp_path, monkeypatch):
    """A working directory with a run in it; variables of launchers out of the way."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "PHALANX_SCHEDULES"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text('{"name": "x"}')
    return tmp_path
