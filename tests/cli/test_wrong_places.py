"""Wrong environments, recipes, terminals, checkpoints and shards: one line for each, in this process, without a rank."""

import os
import socket
import stat

import pytest
from tests.cli.nonsense import BINARY, CONTROLS, DEEP, LINES, PATHS, PLAN, WORDS, check, mutants, say

from phalanx.cluster import PROFILES, by_size, uniform
from phalanx.schedule import lower, ring, to_text

pytestmark = pytest.mark.usefixtures("run_directory")
PLANNED = by_size.to_file(uniform(2, latency=1e-5, bandwidth=1e9), PROFILES["plain"])


@pytest.mark.parametrize("verb", ["train", "bench allreduce", "selftest"])
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
    check(["bench", "allreduce", "--ranks", "2", "--algorithm", "wrong.txt"], codes=(2,))
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
    for argv in (["show", "torus:2x3"], ["show-lr", "digits", "--samples", "100"], ["--help"], ["plan", "--help"]):
        with monkeypatch.context() as patch:  # pytest's own report, before the end of this test, would not like it
            patch.setenv("COLUMNS", columns)
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
