"""Wrong command lines, generated: every option of every verb with every kind of nonsense, and every file with nonsense inside.

The promise: exit code 1 or 2 and one line on standard error, whatever was typed. A new option is covered when it exists. Where
nonsense happens to be sensible (a --jitter of 1e-300) the verb may do its work. All in this process: nothing here starts ranks.
"""

import argparse
import contextlib
import io
import json
import os
import re
import socket
import stat
import warnings
from pathlib import Path

import pytest
from tests.cli.nonsense import BINARY, DEEP, PATHS, WORDS, mutants

from phalanx.cli.main import build_parser, main
from phalanx.cluster import PRESETS, PROFILES, by_size, model, model_file, profile, uniform
from phalanx.cluster.workload import Compute, Model, Tensor
from phalanx.schedule import lower, ring, to_json, to_text

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
    "show": ["show", "ring:3"],
    "verify": ["verify", "ring:3"],
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
        assert err == "" or err.startswith("trace: "), (shown, err)
    tried["lines"] += 1
    tried["wrong"] += bool(code)


def leaves(parser, name=()):
    """Every parser without verbs below it, by its verb."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield " ".join(name), parser
    for action in below:
        for verb, inner in action.choices.items():
            yield from leaves(inner, (*name, verb))


PARSERS = dict(leaves(build_parser()))


@pytest.fixture(autouse=True)
def run_directory(tmp_path, monkeypatch):
    """A working directory with a run in it; variables of launchers out of the way."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "PHALANX_SCHEDULES"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text('{"name": "x"}')
    return tmp_path


def test_every_verb_has_a_line_here():
    assert PARSERS.keys() == LINES.keys()


@pytest.mark.parametrize("verb", LINES)
def test_every_option_takes_or_refuses_every_word(verb):
    for number, action in enumerate(PARSERS[verb]._actions):
        if action.nargs == 0:
            continue
        words = PATHS + WORDS[::5] if action.type is Path else WORDS if action.type or action.choices else PATHS + WORDS
        for word in words[number % 2 :: 2]:
            if action.option_strings:
                check([*LINES[verb], f"{action.option_strings[-1]}={word}"])
            else:
                check([*LINES[verb][: len(verb.split())], "--", word])


@pytest.mark.parametrize("verb", LINES)
def test_what_no_parser_accepts(verb):
    words = verb.split()
    for more in (["--no-such-option"], ["a", "b", "c", "d"], ["--", "\x1b[31m"], ["a\0b"], ["--no"], ["-z"]):
        check([*words, *more], codes=(1, 2))
    check([*words[:-1], words[-1] + "x"], codes=(2,))


def test_every_setting_refuses_nonsense():
    for path in (line.split("=")[0] for line in say(["train", "--show"])[2].splitlines()):
        for word in ("", "x", "-1", "nan", "1e300", "9" * 400, "\x1b[31m", "1x1", "a,b", "\udcff"):
            check(["show-lr", "digits", "--samples", "100", "--set", f"{path}={word}"])
    for setting in ("", "=", "=1", "epochs", "epochs.x=1", "stages=1x", f"stages={'9' * 400}x1", "stages=0x0", "x" * 5000 + "=1"):
        check(["show-lr", "digits", "--samples", "100", "--set", setting], codes=(2,))


# ---- files ---------------------------------------------------------------------------------------------------------------------

SMALL = Model("m", (Tensor("w", 10, 1.0, 0), Tensor("b", 10, 1.0, 0)), 100)
ROW = {"contender": "phalanx ring(1)", "size": 4096, "time_us": 10.0}
FILES = {
    "schedule.json": (to_json(ring(2)), [["show"], ["verify"], ["show", "--json"], ["show", "--lower"]]),
    "schedule.txt": (to_text(ring(2)), [["show"], ["verify"], ["show", "--text"]]),
    "cluster.json": (model.to_json(PRESETS["lab"]), [[*PLAN[:1], *PLAN[3:], "--cluster"]]),
    "model.json": (model_file.to_json(SMALL, Compute(1.0, 1.0, 0.3, "")), [[*PLAN, "--model"]]),
    "profile.json": (profile.to_json(PROFILES["nccl"]), [[*PLAN, "--profile"]]),
    "rows.jsonl": (json.dumps(ROW) + "\n", [[*PLAN, "--calibrate"]]),
    "plan.json": (
        json.dumps(
            {
                "hosts": 1,
                "per_host": 2,
                "batch": 120,
                "run": {"schedule": "ring:2", "group_bytes": 8e6, "wire_bytes": 2, "sync": "all-reduce"},
            }
        ),
        [["train", "digits", "--ranks", "3000", "--plan"]],
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_every_file_of_nonsense_is_one_line(run_directory, name):
    content, lines = FILES[name]
    path = run_directory / name
    for number, text in enumerate((*BINARY, DEEP, *mutants(content, seed=name))):
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
        check([*lines[number % len(lines)], str(path)])


TRACE = {"traceEvents": [{"name": "forward", "cat": "phase", "ph": "X", "pid": 0, "tid": 0, "ts": 0, "dur": 5.5}]}
RUN = {
    "config.json": json.dumps({"name": "digits", "epochs": 6, "comm": {"sync": "allreduce"}}),
    "environment.json": json.dumps(
        {"date": "d", "ranks": 2, "schedule": {"name": "r", "text": to_text(ring(2))}, "command": ["a"]}
    ),
    "metrics.jsonl": "".join(
        json.dumps(row) + "\n"
        for row in (
            {"kind": "start", "step": 0, "ranks": 2, "seconds": 0.0},
            {"kind": "interval", "step": 5, "epoch": 0.5, "rate": 0.1, "loss": 2.0, "seconds": 1.0, "times": {"wait": 0.1}},
            {"kind": "evaluation", "step": 5, "epoch": 1, "top1": 0.5, "loss": 1.0, "seconds": 2.0},
            {"kind": "straggler", "step": 5, "rank": 1, "cause": "input", "factor": 2.0},
            {"kind": "end", "why": "epochs"},
        )
    ),
    "trace.json": json.dumps(TRACE),
    "plan.json": json.dumps({"model": "m", "batch": 1, "run": {"schedule": "r"}, "terms_s": {"input": 0.1}, "step_s": 0.1}),
}


@pytest.mark.parametrize("name", RUN)
def test_a_report_of_anything_is_a_page_or_one_line(run_directory, name):
    for other, content in RUN.items():
        (run_directory / "run" / other).write_text(content)
    for text in (*BINARY, DEEP, *mutants(RUN[name], seed=name)):
        (run_directory / "run" / name).write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
        code, err, _ = say(["report", "run"])
        assert code in (0, 2), (text[:200], err)
        assert err.count("\n") == (code != 0), (text[:200], err)
        if name == "trace.json" and not isinstance(text, bytes) and text.startswith("{"):
            assert "<meta http" in (run_directory / "run" / "report.html").read_text()


PLANNED = by_size.to_file(uniform(2, latency=1e-5, bandwidth=1e9), PROFILES["plain"])


@pytest.mark.parametrize("verb", ["train", "bench allreduce"])
def test_nonsense_in_the_environment_is_one_line(run_directory, monkeypatch, verb):
    path = run_directory / "schedules.json"
    for text in mutants(PLANNED, seed=verb)[:20]:
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        monkeypatch.setenv("PHALANX_SCHEDULES", str(path))
        check(LINES[verb], codes=(2,))
    monkeypatch.setenv("PHALANX_SCHEDULES", "nowhere")
    check(LINES[verb], codes=(2,))
    monkeypatch.delenv("PHALANX_SCHEDULES")
    one = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    for changed in (
        {"MASTER_PORT": "99999"}, {"MASTER_PORT": "0"}, {"MASTER_PORT": "-1"}, {"MASTER_PORT": "x"}, {"MASTER_PORT": "9" * 400},
        {"MASTER_ADDR": ""}, {"MASTER_ADDR": "a" * 70}, {"MASTER_ADDR": "a b"}, {"MASTER_ADDR": "a..b"},
        {"RANK": "2"}, {"RANK": "-1"}, {"RANK": "x"}, {"RANK": ""}, {"RANK": "\x1b[31m"}, {"RANK": "٣"},
        {"WORLD_SIZE": "0"}, {"WORLD_SIZE": "9" * 400}, {"WORLD_SIZE": "1.5"}, {"LOCAL_RANK": "-3"}, {"LOCAL_WORLD_SIZE": "0"},
        {"PHALANX_LISTENER": "x"}, {"PHALANX_FORM": "nonsense"}, {"PHALANX_AGENT": "x"}, {"PHALANX_AGENT": "-1"},
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            for key, value in (one | changed).items():
                patch.setenv(key, value)
            check([*LINES[verb][: len(verb.split())]], codes=(2,))


def test_ranks_that_do_not_come_are_one_line(run_directory, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:  # a port where nobody listens any more
        port = listener.getsockname()[1]
    for key, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(key, value)
    check(["train", "--set", "comm.timeout=0.5"], codes=(1,))
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")
    check(["train", "--set", "comm.timeout=0.5"], codes=(1,))


def test_a_wrong_schedule_is_refused_before_ranks_are_started(run_directory):
    wrong = to_text(lower(ring(2))).replace("add 0 -> 1 [1]", "copy 0 -> 1 [1]")
    assert wrong != to_text(lower(ring(2)))
    (run_directory / "wrong.txt").write_text(wrong)
    check(["bench", "allreduce", "--ranks", "2", "--algorithm", "wrong.txt"], codes=(1,))
    check(["train", "--ranks", "2", "--set", "comm.algorithm=wrong.txt"], codes=(2,))


def test_no_launcher_s_variables_are_believed(monkeypatch):
    for key, variables in {
        "OMPI_COMM_WORLD_SIZE": {"OMPI_COMM_WORLD_RANK": "0"},
        "PMI_SIZE": {"PMI_RANK": "0"},
        "SLURM_STEP_NUM_TASKS": {"SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "a[1-3"},
        "SLURM_STEP_NODELIST": {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"},
        "TORCHELASTIC_RESTART_COUNT": {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h"},
    }.items():
        numbers = (
            ("", "x", "-1", "0", "9" * 400, "1.5", "٣") if key != "TORCHELASTIC_RESTART_COUNT" else ("", "x", "1.5", "9" * 400)
        )
        for value in ("", "[", "a" * 99, "\x1b[31m", "a b") if key.endswith("LIST") else numbers:
            with monkeypatch.context() as patch:
                for name, text in (variables | {key: value}).items():
                    patch.setenv(name, text)
                check(["train"], codes=(2,))


@pytest.mark.parametrize("columns", ["0", "1", "-5", "x", "", "7", "9" * 30])
def test_any_width_of_the_terminal_will_do(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    for argv in (["show", "torus:2x3"], ["show-lr", "digits", "--samples", "100"], ["--help"], ["plan", "--help"]):
        code, err, out = say(argv)
        assert (code, err) == (0, ""), argv
        assert out


def test_checkpoints_and_runs_of_nonsense_are_one_line(run_directory):
    place = run_directory / "other" / "checkpoints" / "step-000000001"
    place.mkdir(parents=True)
    for content in (*BINARY, DEEP.encode()):
        (place / "manifest.json").write_bytes(content)
        code, err, _ = say(["export", "other", "model.pt"])
        assert code == 1
        assert err.count("\n") == 2, "which one is damaged, and that there is no other"
    for content in (b"{}", b"\xff", DEEP.encode()):
        (run_directory / "run" / "config.json").write_bytes(content)
        check(["train", "--ranks", "1", "--resume", "--out", "run"], codes=(2,))


def test_what_is_no_file_is_not_replaced_by_one(run_directory):
    """As root `report --out /dev/null` would make a file of it."""
    os.mkfifo("pipe")
    for argv in (
        ["report", "run", "--out", "pipe"],
        ["export", "run", "pipe"],
        ["report", "run", "--out", "."],
        ["export", "run", "."],
    ):
        check(argv, codes=(2,))
    assert stat.S_ISFIFO(os.stat("pipe").st_mode)
    for argv in (["show", "ring:3", "--trace"], [*PLAN, "--json"], [*PLAN, "--svg"], [*PLAN, "--save-profile"]):
        check([*argv, "/dev/full"], codes=(2,))
    for argv in ([*PLAN, "--calibrate"], [*PLAN, "--profile"], [*PLAN, "--cluster"], ["train", "--plan"], ["show"]):
        check([*argv, "/dev/zero"], codes=(2,))


def test_shards_of_any_name_are_packed_or_refused(run_directory):
    (run_directory / "images" / "a").mkdir(parents=True)
    (run_directory / "images" / "b").mkdir()
    for name in ("a/1.png", "b/2.png"):
        (run_directory / "images" / name).write_bytes(b"\x89PNG")
    for pattern in (*PATHS, *WORDS[::2], "%d", "%s-%d", "%99999d", "%d%d", "x%", "nowhere/%d"):
        code, err, out = say(["pack", "imagefolder:images", "--split", "train", "--", pattern])
        assert code in (0, 1, 2)
        assert err.count("\n") == 1
        assert not CONTROLS.search(err + out)


def test_a_recipe_may_do_anything(run_directory):
    head = "from phalanx.train.config import RunConfig\nconfig = RunConfig(name='x', "
    for text in (
        "import sys\nsys.exit()", "raise SystemExit('bye\\nbye')", "1 / 0", "config = 3", "\x00", "def f(): f()\nf()",
        "raise ValueError('\\x1b[31m\\n' * 9)", "assert False", f"{head}epochs='many')", f"{head}batch=None)", f"{head}seed=1j)",
        "raise MemoryError", "(" * 500, f"{head}epochs=10**400)",
    ):  # fmt: skip
        (run_directory / "recipe.py").write_text(text)
        check(["show-lr", "recipe.py"], codes=(2,))
    for field in ("name='a\\0b'", f"name={'a' * 300!r}", "name='\\ud800'"):
        (run_directory / "recipe.py").write_text(f"from phalanx.train.config import RunConfig\nconfig = RunConfig({field})")
        check(["train", "recipe.py", "--ranks", "1"], codes=(2,))
    for source in ("imagefolder:a\\0b", "mnist:\\ud800", "shards:\\x1b[2J-*.tar", "synthetic:", "cifar10:" + "a" * 300, "\\0"):
        data = f"from phalanx.train.samples import DataConfig\n{head}data=DataConfig(source='{source}'))"
        (run_directory / "recipe.py").write_text(data)
        check(["train", "recipe.py", "--ranks", "1"], codes=(2,))


def test_there_were_many_of_them():
    """Last in this file: 300 wrong lines were promised."""
    assert tried["wrong"] >= 300 or tried["lines"] < 300, tried  # fewer only if some tests were selected
