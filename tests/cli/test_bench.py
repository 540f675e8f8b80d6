"""`phalanx bench`: both benchmarks end to end on 2 ranks, their records, wrong usage, ranks that fail, wrong sums."""

import json
import os
import socket
import subprocess
import sys
import textwrap

import pytest
import torch
from tests.long import often, only_long

import phalanx
from phalanx.bench.allreduce import PERIOD, count_wrong, inputs
from phalanx.bench.config import TRAINED, AllReduceBench, TrainBench, from_record
from phalanx.bench.cores import CORES, are_crowded
from phalanx.bench.table import print_table
from phalanx.bench.train import APART
from phalanx.cli.main import main
from phalanx.cli.numbers import parse_size

DEADLINE = "60"


def records_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def sabotage(folder, monkeypatch, code):
    """Let `code` run at the start of every Python process from now on that has a RANK."""
    body = textwrap.indent(textwrap.dedent(code), "    ")
    (folder / "sitecustomize.py").write_text(f"import os, sys\nif 'RANK' in os.environ:\n{body}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))


# ---- end to end --------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("warm_python")
def test_allreduce(tmp_path, capfd):
    path = tmp_path / "rows.jsonl"
    sizes = ["--min", "256", "--max", "4K", "--repeat", "3"]
    argv = [
        "bench",
        "allreduce",
        "--ranks",
        "2",
        *sizes,
        "--algorithm",
        "ring:2",
        "--pin",
        "--json",
        str(path),
        "--deadline",
        DEADLINE,
    ]
    assert main(argv) == 0
    first, *rows, last = records_of(path)
    assert first["config"] == {
        "verb": "allreduce", "ranks": 2, "smallest": 256, "largest": 4096, "repeat": 3, "algorithms": ["ring:2"], "pin": True,
    }  # fmt: skip
    assert first["versions"]["torch"] == torch.__version__
    assert first["hosts"] == [socket.gethostname()]
    assert first["date"]
    assert first["launcher"] == "phalanx bench"
    assert last["seconds"] > 0
    contenders = ["phalanx buffer", "phalanx tensor", "phalanx ring(2)", "gloo"]
    assert [(row["size"], row["contender"]) for row in rows] == [(n, who) for n in (256, 1024, 4096) for who in contenders]
    for row in rows:
        assert row["wrong"] == 0
        assert row["crowded"] == (0 if len(CORES) > 1 else 1)
        assert row["count"] * 4 == row["size"]
        assert len(row["times_us"]) == 3
        assert row["busbw"] == row["algbw"] > 0  # 2(n-1)/n is 1 for 2 ranks
        assert row["times_gloo"] == pytest.approx(1) or row["contender"] != "gloo"
    out = capfd.readouterr().out
    assert out.startswith("# phalanx bench allreduce: 2 ranks")
    (heading,) = [line for line in out.splitlines() if "size(B)" in line]
    names = [
        "size(B)",
        "count",
        "type",
        "redop",
        "contender",
        "time(us)",
        "algbw(GB/s)",
        "busbw(GB/s)",
        "#wrong",
        "crowded",
        "x",
        "gloo",
    ]
    assert heading.split()[1:] == names
    assert sum(line.startswith("  ") for line in out.splitlines()) == len(rows)


@pytest.mark.usefixtures("warm_python")
@only_long
def test_train(tmp_path, capfd):
    path = tmp_path / "rows.jsonl"
    model = ["--model", "resnet_cifar20", "--pixels", "8", "--batch", "2", "--repeat", "2", "--all"]
    assert main(["bench", "train", "--ranks", "2", *model, "--json", str(path), "--deadline", DEADLINE]) == 0
    first, *rows, _last = records_of(path)
    assert first["config"] == {
        "verb": "train", "ranks": 2, "model": "resnet_cifar20", "pixels": 8, "batch": 2, "repeat": 2,
        "everybody": True, "pin": False, "only": [], "optimizer": "sgd",
    }  # fmt: skip
    timed = {row["contender"]: row for row in rows if "note" not in row}
    assert {"none", "DDP", "DDP fp16", "phalanx", "phalanx inline", "phalanx bfloat16"} <= timed.keys()
    assert {"Horovod", "decent-dp"} <= {row["contender"] for row in rows}  # timed, or said to be missing
    for name, row in timed.items():
        assert row["step_ms"] > 0
        assert len(row["times_ms"]) == 2
        assert row["wrong"] == (None if name in ("none", "decent-dp") else 0)
    assert timed["DDP"]["times_ddp"] == pytest.approx(1)
    assert timed["none"]["over_none_ms"] is None
    assert timed["phalanx"]["over_none_ms"] == pytest.approx(timed["phalanx"]["step_ms"] - timed["none"]["step_ms"])
    out = capfd.readouterr().out
    (heading,) = [line for line in out.splitlines() if "step(ms)" in line]
    assert heading.split()[1:] == ["contender", "step(ms)", "spread(ms)", "over", "none(ms)", "x", "DDP", "#differ"]


@pytest.mark.usefixtures("warm_python")
def test_train_with_replicas_that_differ(tmp_path):
    path = tmp_path / "rows.jsonl"
    chosen = {
        "phalanx PowerSGD",
        "phalanx diloco streamed",
        *often("phalanx local-sgd", "phalanx gossip", "phalanx gossip exact"),
    }
    only = [name for name in TRAINED if name in chosen]  # rows come in the order of the table
    assert set(only) == chosen
    options = [
        "--model",
        "resnet_cifar20",
        "--pixels",
        "8",
        "--batch",
        "1",
        "--repeat",
        "1",
        *(f"--only={name}" for name in only),
    ]
    assert main(["bench", "train", "--ranks", "2", *options, "--json", str(path), "--deadline", DEADLINE]) == 0
    _first, *rows, _last = records_of(path)
    assert [row["contender"] for row in rows] == ["none", "DDP", *only]
    assert set(APART) <= set(TRAINED)
    wrong = {row["contender"]: row["wrong"] for row in rows}
    assert wrong == {name: None if name in ("none", *APART) else 0 for name in wrong}


@pytest.mark.usefixtures("warm_python")
def test_gossip(tmp_path, capfd):
    path = tmp_path / "rows.jsonl"
    only = ["DDP", "all-reduce", "gossip", "gossip gradients", "decent-dp"]
    options = ["--size", "64K", "--compute", "10", "--steps", "3", "--repeat", "2", *(f"--only={name}" for name in only)]
    assert main(["bench", "gossip", "--ranks", "2", *options, "--json", str(path), "--deadline", DEADLINE]) == 0
    first, *rows, _last = records_of(path)
    assert first["config"] == {
        "verb": "gossip", "ranks": 2, "size": 65536, "compute": 10, "steps": 3, "repeat": 2, "pin": False, "only": only,
    }  # fmt: skip
    assert [row["contender"] for row in rows] == ["none", *only]  # decent-dp timed, or said to be missing
    timed = {row["contender"]: row for row in rows if "note" not in row}
    for row in timed.values():
        assert row["efficiency"] == pytest.approx(10 / row["step_ms"])
        assert 0 < row["efficiency"] < 1  # nobody is quicker than the wait
        assert len(row["times_ms"]) == 2
    roll = 2 * 8
    assert timed["gossip"]["bytes"] == 2 * 65536 + roll  # parameters and momentum
    assert timed["gossip gradients"]["bytes"] == 65536 + roll
    assert timed["gossip"]["exchange_ms"] > 0
    assert timed["gossip"]["spread"] > 0  # gradients are others on every rank
    assert timed["DDP"]["bytes"] is None
    (heading,) = [line for line in capfd.readouterr().out.splitlines() if "step(ms)" in line]
    assert heading.split()[1:] == [
        "contender", "step(ms)", "over", "none(ms)", "efficiency", "bytes/step", "exchange(ms)", "spread",
    ]  # fmt: skip


@pytest.mark.usefixtures("warm_python")
def test_under_a_launcher_and_a_contender_that_does_nothing(tmp_path, monkeypatch):
    """The ranks are those of the launcher, only rank 0 prints, and the wrong sums are counted exactly."""
    sabotage(tmp_path, monkeypatch, "import phalanx.bench.library as t\nt.library_all_reduce = lambda x: None")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    path = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "phalanx", "bench", "allreduce", "--min", "4K", "--max", "4K", "--repeat", "1"]
    command += ["--json", str(path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen(command, env=env | {"RANK": str(rank)}, **pipes) for rank in range(2)]
    try:
        said = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert said[1] == ("", "")
    assert "started by environment" in said[0][0]
    # zeros stay zeros where the other rank has none: everything else is wrong, on both ranks, before and after the timing
    wrong = 2 * sum(inputs(other)[i % PERIOD] != 0 for other in (0, 1) for i in range(1024))
    assert f"phalanx: {wrong} results were wrong" in said[0][1]
    assert [row["wrong"] for row in records_of(path)[1:-1]] == [0, 0, wrong]


# ---- when it fails -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("warm_python")
def test_a_rank_that_fails_is_shown(tmp_path, monkeypatch, capfd):
    sabotage(
        tmp_path, monkeypatch, "if os.environ['RANK'] == '1':\n    print('the dog ate it')\n    sys.stdout.flush(); os._exit(7)"
    )
    assert main(["bench", "allreduce", "--ranks", "2", "--max", "4K"]) == 1
    err = capfd.readouterr().err
    assert "phalanx: rank 1 of 2 failed with exit code 7" in err
    assert "the dog ate it" in err
    assert "Traceback" not in err


def test_the_words_of_rank_0_are_on_the_screen(tmp_path, monkeypatch, capfd):
    sabotage(tmp_path, monkeypatch, "print('no luck', file=sys.stderr, flush=True); os._exit(3)")
    assert main(["bench", "train", "--ranks", "2"]) == 1
    err = capfd.readouterr().err
    assert "no luck" in err
    assert "failed with exit code 3" in err


def test_the_deadline(tmp_path, monkeypatch, capfd):
    sabotage(tmp_path, monkeypatch, "import time; time.sleep(60)")
    assert main(["bench", "allreduce", "--ranks", "2", "--max", "4K", "--deadline", "1"]) == 1
    assert "phalanx: rank(s) 0, 1 of 2 did not finish within 1 s" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("argv", "fact"),
    [
        ([], "BENCHMARK"),
        (["allgather"], "allgather"),
        (["allreduce", "--min", "4Q"], "4Q"),
        (["allreduce", "--min", "8K", "--max", "4K"], "the smaller first"),
        (["allreduce", "--min", "0"], "at least 4"),
        (["allreduce", "--min", "6"], "multiples of 4"),
        (["allreduce", "--ranks", "0"], "at least 1"),
        (["allreduce", "--ranks", "1"], "from 2 to"),
        (["allreduce", "--ranks", "100000"], "from 2 to"),
        (["allreduce", "--ranks", "2", "--algorithm", "star:2"], "star:2"),
        (["allreduce", "--ranks", "2", "--algorithm", "ring:4"], "is for 4 ranks, but there are 2"),
        (["allreduce", "--ranks", "2", "--algorithm", "gossip:2"], "not the sum"),
        (["allreduce", "--ranks", "2", "--json", "/no/where.jsonl"], "cannot write the records"),
        (["train", "--model", "alexnet"], "alexnet"),
        (["train", "--repeat", "none"], "none"),
        (["gossip", "--only", "ring"], "the contenders are none, DDP"),
    ],
)
def test_wrong_usage_exits_with_2(argv, fact, capsys):
    assert main(["bench", *argv]) == 2
    assert fact in capsys.readouterr().err


def test_ranks_that_contradict_the_launcher(monkeypatch, capsys):
    for key, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(key, value)
    assert main(["bench", "train", "--ranks", "3"]) == 2
    assert "environment started 2: leave --ranks out" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert main(["bench", "train"]) == 2
    assert "one rank" in capsys.readouterr().err


def test_help_has_examples_and_does_not_import_torch():
    code = "import sys; from phalanx.cli.main import main; main(['bench', 'train', '--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "examples:" in done.stdout
    assert "phalanx bench allreduce" in done.stdout


# ---- the values --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bench", [AllReduceBench(4, 64, 3, ("ring:2",)), AllReduceBench(4, 4, 1), TrainBench("resnet18", 8, 2, 3)]
)
def test_a_bench_survives_json(bench):
    from dataclasses import asdict

    assert from_record(json.loads(json.dumps({"verb": bench.verb, **asdict(bench)}))) == bench


def test_sizes():
    assert [parse_size(text) for text in ("12", "4K", "4k", "64M", "1G")] == [12, 4096, 4096, 64 << 20, 1 << 30]
    assert list(AllReduceBench(4096, 4096, 1).sizes()) == [4096]
    assert list(AllReduceBench(4096, 20000, 1).sizes()) == [4096, 16384, 20000]


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
def test_wrong_sums_are_counted(world):
    """A right all-reduce has none; one that forgets a rank, doubles one, or shifts its chunks is noticed almost everywhere."""
    right = phalanx.run_local(world, lambda comm: count_wrong(comm, torch.empty(1000), comm.all_reduce))
    assert right == [0] * world

    def forgets(comm, x):
        x.zero_() if comm.rank == world - 1 else x
        comm.all_reduce(x)

    def doubles(comm, x):
        x.mul_(2) if comm.rank == 0 else x
        comm.all_reduce(x)

    def shifts(comm, x):
        comm.all_reduce(x)
        x.copy_(x.roll(64))

    for mutant in (forgets, doubles, shifts):
        counts = phalanx.run_local(world, lambda comm, f=mutant: count_wrong(comm, torch.empty(1000), lambda x: f(comm, x)))
        assert min(counts) > 900


def test_crowded_ranks():
    assert are_crowded([(0, 1), (0, 2), (0, 1)])
    assert not are_crowded([(0, 1), (1, 1), (0, 2)])  # the same number on another host is another core
    assert not are_crowded([(0, None), (0, None)])


def test_the_inputs_are_exact_in_float32_for_thousands_of_ranks():
    assert max(inputs(3)) * 65536 < 2**24


def test_the_table_shows_what_is_missing_as_a_dash(capsys):
    show = print_table()
    first = {
        "config": {"verb": "train", "ranks": 2, "repeat": 1}, "date": "today", "versions": {"torch": "2"}, "hosts": ["h"],
        "processor": "p", "cores": 2, "native_core": "avx2", "launcher": "hand", "schedule": "ring(2)",
    }  # fmt: skip
    show(first)
    show({"contender": "none", "step_ms": 1.0, "spread_ms": 0.5, "over_none_ms": None, "times_ddp": 2.0, "wrong": None})
    assert capsys.readouterr().out.splitlines()[-1].split() == ["none", "1.00", "0.50", "-", "2.00", "-"]
