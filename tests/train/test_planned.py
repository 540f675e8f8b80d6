"""A plan that a run follows: the settings it means, and the runs it is not for."""

import json
from dataclasses import replace

import pytest

from phalanx.cli.main import main
from phalanx.cli.train import resolve
from phalanx.recipes.digits import config as digits
from phalanx.train.config import ConfigError
from phalanx.train.planned import read_plan
from phalanx.train.report.gap import explain, measured_step
from phalanx.train.report.run import read_run

ASK = ["plan", "--cluster", "lab", "--ranks", "2", "--batch", str(digits.batch), "--rate", "2000@60", "--backend", "shm+gloo"]


def made(path, **run):
    asked = {"schedule": "torus:4x2", "group_bytes": 4e6, "wire_bytes": 2, "sync": "all-reduce"} | run
    path.write_text(json.dumps({"hosts": 4, "per_host": 2, "batch": digits.batch, "run": asked}))
    return read_plan(path)


def test_a_plan_becomes_settings_and_set_has_the_last_word(tmp_path):
    plan = made(tmp_path / "plan")
    comm = resolve("digits", ["comm.bucket_bytes=1000000"], plan.settings).comm
    assert (comm.sync, comm.algorithm, comm.wire, comm.double_buffering) == ("allreduce", "torus:4x2", "float16", False)
    assert comm.bucket_bytes == 1_000_000
    assert resolve("digits", [], plan.settings).comm.bucket_bytes == 4_000_000


@pytest.mark.parametrize(("schedule", "level"), [("gossip:8", "rank"), ("gossip-hosts:4x2", "host")])
def test_gossip_is_a_plan_too(schedule, level, tmp_path):
    comm = resolve("digits", [], made(tmp_path / "plan", schedule=schedule, sync="gossip", wire_bytes=4).settings).comm
    assert (comm.sync, comm.gossip.level, comm.wire) == ("gossip", level, None)


def test_a_plan_for_another_run_is_refused(tmp_path):
    plan = made(tmp_path / "plan")
    plan.check(digits, 8)
    with pytest.raises(ConfigError, match=r"for 8 ranks on 4 host\(s\), but there are 2 here"):
        plan.check(digits, 2)
    with pytest.raises(ConfigError, match=f"plan for a batch of 64, but the recipe has {digits.batch}"):
        replace(plan, batch=64).check(digits, 8)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"hosts": 1, "per_host": 1, "batch": 1, "run": {"schedule": "ring:1"}}'])
def test_a_file_that_is_no_plan_is_refused(text, tmp_path):
    (tmp_path / "plan").write_text(text)
    with pytest.raises(ConfigError, match="not a plan"):
        read_plan(tmp_path / "plan")
    with pytest.raises(ConfigError, match="No such file"):
        read_plan(tmp_path / "absent")


@pytest.mark.usefixtures("warm_python")
def test_what_is_planned_is_what_is_trained(tmp_path, capfd):
    plan, out = tmp_path / "plan.json", tmp_path / "run"
    assert main([*ASK, "--json", str(plan)]) == 0
    short = ["--set", "epochs=1", "--set", "rate.warmup=0"]
    assert main(["train", "digits", "--ranks", "2", "--plan", str(plan), *short, "--out", str(out)]) == 0
    assert json.loads((out / "plan.json").read_text()) == json.loads(plan.read_text())
    assert "Predicted and measured" in (out / "report.html").read_text()
    assert json.loads((out / "config.json").read_text())["comm"]["wire"] == "float16"
    assert "ms, the plan predicted" in capfd.readouterr().out
    run = read_run(out, "run")
    measured = measured_step(run)
    computing = {"computing samples": measured}
    assert explain(run, run.plan | {"step_s": measured, "terms_s": computing}).endswith("as planned")
    slower = explain(run, run.plan | {"step_s": measured / 2, "error": 0.1, "terms_s": {"computing samples": measured / 1e3}})
    assert "(+100%), beyond its uncertainty of 10%. Most of it is computing:" in slower
    assert "measure it with this batch" in slower
    faster = explain(run, run.plan | {"step_s": 2 * measured, "error": 0.9, "terms_s": {"optimizer": measured}})
    assert "(-50%), within its uncertainty of 90%. Most of it is update:" in faster
