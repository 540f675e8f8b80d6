"""`phalanx selftest` as a user runs it: alone, under launchers, with a rank that dies, and with wrong options."""

import json
import os
import socket
import subprocess
import sys
import textwrap

import pytest
import torch

from phalanx.cli.main import main
from phalanx.selftest.runner import SHARES

DEADLINE = 100.0  # seconds, on a busy machine
MINUTES = "0.04"  # each check does the least that it can

CHECK = """
    import os, signal
    from phalanx.selftest import correctness
    from phalanx.selftest.result import Check, passed
    def run(trial):
        if trial.comm.rank == {victim}:
            os.kill(os.getpid(), signal.SIGKILL)
        return passed("fine")
    usual = correctness.checks
    correctness.checks = lambda: [Check("correctness", "a rank dies", run, None), *usual()]
"""


def selftest(*words, env=None, launcher=()):
    """The finished process."""
    command = [sys.executable, "-m", *launcher, "phalanx", "selftest", "--minutes", MINUTES, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, env=env, check=False)


def lines_of(text):
    """The lines of checks as (status, group, rest)."""
    return [tuple(line.split(maxsplit=2)) for line in text.splitlines() if line.startswith(("PASS", "FAIL", "SKIP"))]


def check_passed(done, ranks, path):
    """All is well, and terminal and file say the same."""
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(path.read_text())
    assert [(own["status"], own["group"]) for own in record["checks"]] == [found[:2] for found in lines_of(done.stdout)]
    assert list(dict.fromkeys(own["group"] for own in record["checks"])) == list(SHARES)
    assert [own for own in record["checks"] if own["status"] == "FAIL"] == []
    by_name = {own["name"]: own for own in record["checks"]}
    for name in ("ranks and hosts", "versions", "all_reduce"):
        assert by_name[name]["status"] == "PASS"
    assert by_name["killed rank on GPUs"]["status"] == "SKIP"
    assert all(own["reason"] for own in record["checks"])
    assert record["ranks"] == len(record["places"]) == ranks
    assert record["places"][0]["versions"]["torch"] == torch.__version__
    assert record["hosts"] == [socket.gethostname()]
    return record


@pytest.mark.usefixtures("warm_python")
def test_alone(tmp_path):
    path = tmp_path / "selftest.json"
    done = selftest("--json", str(path))
    record = check_passed(done, 2, path)
    assert record["launcher"] == "phalanx"
    assert done.stdout.startswith("# phalanx selftest: 2 ranks on 1 host, CPU, started by phalanx")
    assert ", 0 failed, " in done.stdout.splitlines()[-1]
    assert [file.name for file in tmp_path.iterdir()] == ["selftest.json"]


@pytest.mark.usefixtures("warm_python")
def test_under_torchrun(tmp_path):
    path = tmp_path / "selftest.json"
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--"]
    done = selftest("--json", str(path), launcher=launcher)
    record = check_passed(done, 2, path)
    assert record["launcher"] == "torchrun"
    assert done.stdout.count("# phalanx selftest: ") == 1  # one rank prints


def test_one_rank(tmp_path, capfd):
    """In this process, as for a launcher that starts one rank."""
    path = tmp_path / "selftest.json"
    code = main(["selftest", "--ranks", "1", "--minutes", MINUTES, "--json", str(path)])
    check_passed(subprocess.CompletedProcess([], code, *capfd.readouterr()), 1, path)


# ---- a rank that dies --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_is_named(tmp_path, victim):
    """By the first rank that is left; the exit code is that of a selftest that failed."""
    body = textwrap.indent(textwrap.dedent(CHECK.format(victim=victim)), "    ")
    (tmp_path / "sitecustomize.py").write_text(f"import os\nif 'RANK' in os.environ:\n{body}")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    path = tmp_path / "selftest.json"
    done = selftest("--json", str(path), env=env)
    assert done.returncode == 1, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert line.startswith("FAIL  correctness  a rank dies ")
    assert f"rank {victim} " in line
    assert "Remedy: " in line
    assert ", 1 failed, " in done.stdout.splitlines()[-1]
    record = json.loads(path.read_text())
    assert record["failed"] == 1
    (failed,) = [own for own in record["checks"] if own["status"] == "FAIL"]
    assert f"rank {victim} " in failed["reason"]
    after = record["checks"][record["checks"].index(failed) + 1 :]
    assert {own["status"] for own in after} == {"SKIP"}


# ---- the job in which a rank is killed ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("warm_python")
def test_the_killed_rank_is_named():
    from phalanx.selftest.failure import RANKS, _kill_a_rank
    from phalanx.selftest.result import Status

    found = _kill_a_rank(RANKS, "cpu", 60.0)
    assert found.status is Status.PASS, found
    assert "named the killed rank 1" in found.reason


# ---- wrong usage -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "fact"),
    [
        (["--ranks", "0"], "at least 1"),
        (["--ranks", "two"], "'two'"),
        (["--ranks", "100000"], "from 1 to 256"),
        (["--minutes", "0"], "a number of minutes"),
        (["--minutes", "nan"], "a number of minutes"),
        (["--minutes", "-1"], "a number of minutes"),
        (["--minutes", "1e9"], "a number of minutes"),
        (["--json", "/no/where.json"], "--json /no/where.json: cannot write there: No such file or directory"),
        (["--json", "/proc/x.json"], "--json /proc/x.json: cannot write there"),
        (["--json", "."], "it is a directory"),
        (["8"], "8"),
    ],
)
def test_wrong_usage_exits_with_2(argv, fact, capsys):
    assert main(["selftest", *argv]) == 2
    said = capsys.readouterr().err
    assert fact in said
    assert said.count("\n") == 1


def test_ranks_that_contradict_the_launcher(monkeypatch, capsys):
    for key, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(key, value)
    assert main(["selftest", "--ranks", "3"]) == 2
    assert "environment started 2: leave --ranks out" in capsys.readouterr().err
