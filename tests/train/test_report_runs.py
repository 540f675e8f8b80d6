"""Pages of runs that really ran: what a run writes is what its page reads."""

import json
import shlex
import shutil
from dataclasses import replace

import pytest
from tests.train.runs import TINY, InterruptedRunError, play, rows
from tests.train.runs import run as train_on_threads
from tests.train.test_report import Tags, plots, series

import phalanx
from phalanx.cli.main import main
from phalanx.grad.gossip import Gossip
from phalanx.schedule import from_text, gossip_partners
from phalanx.schedule.ops import Move
from phalanx.train.environment import command
from phalanx.train.report import build, write_report
from phalanx.train.report.run import read_run
from phalanx.train.update import CommConfig


def page(out):
    return build([read_run(out, "r")])


@pytest.fixture(scope="module")
def gossiped(tmp_path_factory):
    out = tmp_path_factory.mktemp("gossip")
    config = replace(TINY, epochs=3, trace_steps=2, comm=CommConfig(sync="gossip", gossip=Gossip(seed=3)))
    train_on_threads(config, 4, out)
    return out


def test_the_spread_that_a_gossiping_run_writes_is_drawn(gossiped, tmp_path):
    found = rows(gossiped, "evaluation")
    assert all(row["spread"] > 0 for row in found)
    drawn = series(plots(page(gossiped))["spread of the replicas"])["spread"]
    assert drawn[0] == [1, 2, 3]
    assert drawn[1] == pytest.approx([row["spread"] for row in found], rel=1e-5)
    train_on_threads(TINY, 2, tmp_path)
    assert "spread of the replicas" not in plots(page(tmp_path))


def test_a_gossiping_run_shows_its_partners_and_no_all_reduce(gossiped):
    text = page(gossiped)
    told = Tags(text).text
    assert "gossip of 4 ranks, dissemination: partners of the first 2 steps, then they rotate" in told
    assert "ring" not in told.partition("all settings")[0]
    assert "all-reduce" not in text
    assert "exchange" in told
    assert "hidden behind the next forward and backward" in told
    environment = json.loads((gossiped / "environment.json").read_text())
    sends = [op for op in from_text(environment["schedule"]["text"]).ops() if isinstance(op, Move)]
    wanted = [(rank, to) for step in range(2) for rank, to in enumerate(gossip_partners(4, step, seed=3))]
    assert [(op.src, op.dst) for op in sends] == wanted
    trace = json.loads((gossiped / "trace.json").read_text())
    kinds = {event["cat"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert kinds == {"step", "phase", "exchange"}
    assert "all-reduce" not in json.dumps(trace)


def test_hosts_that_gossip_are_called_hosts(tmp_path):
    config = replace(TINY, epochs=1, comm=CommConfig(sync="gossip"))
    phalanx.run_local(4, lambda comm: play(comm, config, tmp_path), hosts=2)
    text = Tags(page(tmp_path)).text
    assert "gossip of 2 hosts" in text
    assert "host 1" in text
    assert "hosts down, steps across" in text


def test_a_torus_on_two_hosts(tmp_path):
    phalanx.run_local(4, lambda comm: play(comm, replace(TINY, epochs=1), tmp_path), hosts=2)
    text = page(tmp_path)
    assert "torus(2x2)" in Tags(text).text
    assert "reduce-scatter / send and add" in Tags(text).text


def test_a_resumed_run_is_marked(tmp_path):
    config = replace(TINY, epochs=3, checkpoint_every_steps=5)
    with pytest.raises(InterruptedRunError):
        train_on_threads(config, 2, tmp_path, interrupt=18)
    assert "resumed" not in Tags(page(tmp_path)).text
    train_on_threads(config, 3, tmp_path, resume=True)
    text = page(tmp_path)
    (_, again) = rows(tmp_path, "start")
    assert again["step"] == 15
    told = Tags(text).text
    assert "33 steps · resumed" in told
    assert "from the beginning, 2 rank(s); resumed after step 15, 3 rank(s)" in told
    for title, at in (
        ("loss over epochs", 15 / 11),
        ("accuracy over seconds", again["seconds"]),
        ("learning rate over steps", 15),
    ):
        svg = plots(text)[title]
        (line,) = [own for own in svg.iter("line") if own.find("title") is not None]
        left, right, _, _ = map(float, svg.get("data-box").split())
        x0, x1 = float(svg.get("data-x0")), float(svg.get("data-x1"))
        assert x0 + (float(line.get("x1")) - left) / (right - left) * (x1 - x0) == pytest.approx(at, abs=0.01 * (x1 - x0))
        assert line.find("title").text == "resumed after step 15"


def test_one_group_has_nothing_to_overlap(tmp_path):
    """As the first report that anybody sees has it: the network of the digits fits into one group."""
    one, many = tmp_path / "one", tmp_path / "many"
    train_on_threads(replace(TINY, epochs=1), 2, one)
    assert {row["groups"] for row in rows(one, "interval")} == {1}
    assert "overlap with backward" not in plots(page(one))
    assert "there is nothing to overlap" in Tags(page(one)).text
    train_on_threads(replace(TINY, epochs=1, comm=CommConfig(bucket_bytes=1000)), 2, many)
    assert min(row["groups"] for row in rows(many, "interval")) > 1
    svg = plots(page(many))["overlap with backward"]
    assert float(svg.get("data-y0")) >= 0
    both = build([read_run(one, "one"), read_run(many, "many")])
    assert list(series(plots(both)["overlap with backward"])) == ["many"]


def test_the_command_can_be_copied(tmp_path, monkeypatch, capsys):
    out = tmp_path / "a run's"
    words = [
        "train",
        "--ranks",
        "1",
        "--out",
        str(out),
        "--set",
        "epochs=1",
        "--set",
        "model.width=4",
        "--set",
        "rate.warmup=0.5",
    ]
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/phalanx", *words])
    assert main(words) == 0
    write_report([out], tmp_path / "report.html")
    shown = Tags((tmp_path / "report.html").read_text()).text.partition("\ncommand\n")[2].partition("\n")[0]
    assert shlex.split(shown) == ["phalanx", *words]
    shutil.rmtree(out)
    assert main(shlex.split(shown)[1:]) == 0
    assert out.is_dir()


def test_commands_as_one_types_them():
    assert command(["/site-packages/phalanx/__main__.py", "train"]) == ["python", "-m", "phalanx", "train"]
    assert command(["my train.py", "--x"]) == ["python", "my train.py", "--x"]
    assert command(["/usr/bin/phalanx", "train"]) == ["phalanx", "train"]
