"""MLPerf's lines: one JSON object each, in the order and with the values that a submission wants; and a report that fails.

tests/integrations/test_mlperf.py runs MLPerf's own checker.
"""

import json
from dataclasses import replace

import pytest

from phalanx.cli.train import load
from phalanx.train.config import RunConfig
from phalanx.train.model import BatchNormConfig
from phalanx.train.sinks import RunFacts
from phalanx.train.sinks.mlperf import batchnorm_span, settings
from phalanx.train.trainer import train


def lines(text):
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in text.splitlines() if line.startswith(":::MLLOG ")]


@pytest.mark.parametrize(("target", "status"), [(None, "success"), (0.001, "success"), (1.0, "aborted")])
def test_the_sequence(comm, capsys, target, status):
    config = RunConfig(name="digits", epochs=2, batch=720, mllog=True, target=target, seed=5)
    train(config, comm, show=False)
    told = lines(capsys.readouterr().out)
    assert all(set(line) == {"namespace", "time_ms", "event_type", "key", "value", "metadata"} for line in told)
    times = [line["time_ms"] for line in told]
    assert times == sorted(times)
    keys = [line["key"] for line in told]
    epochs = 1 if target == 0.001 else 2
    assert keys[0] == "init_start"
    assert keys[keys.index("init_stop") :] == [
        "init_stop",
        "run_start",
        *(["epoch_start", "epoch_stop", "eval_start", "eval_accuracy", "eval_stop"] * epochs),
        "run_stop",
    ]
    values = {line["key"]: line["value"] for line in told}
    wanted = {"global_batch_size": 720, "seed": 5, "train_samples": 1437, "eval_samples": 360, "opt_name": "sgd"}
    assert wanted.items() <= values.items()
    assert values["opt_base_learning_rate"] == config.rate.peak
    assert 0 <= values["eval_accuracy"] <= 1
    numbers = [line["metadata"]["epoch_num"] for line in told if "epoch" in line["key"] and line["event_type"] != "POINT_IN_TIME"]
    assert numbers == [n for n in range(1, epochs + 1) for _ in range(2)]
    assert told[-1]["metadata"] == {"status": status}
    kinds = {"start": "INTERVAL_START", "stop": "INTERVAL_END"}
    assert all(line["event_type"] == kinds.get(line["key"].rpartition("_")[2], "POINT_IN_TIME") for line in told)


def facts(config, ranks=64, **environment):
    return RunFacts(config, ranks, 1_281_167, 50_000, {"hosts": 8, "device": "H100"} | environment)


def test_the_keys_of_a_submission_are_those_of_the_run():
    """The numbers are MLPerf's reference convergence point for batches of 32,768, and the recipe says where each is from."""
    config = load("imagenet-resnet50-32k")
    found = dict(settings(facts(replace(config, submission=replace(config.submission, org="ACME")))))
    wanted = {
        "submission_benchmark": "resnet",
        "submission_division": "closed",
        "submission_org": "ACME",
        "submission_platform": "8 x 8 H100",
        "submission_status": "onprem",
        "cache_clear": False,
        "global_batch_size": 32768,
        "gradient_accumulation_steps": 4,
        "model_bn_span": 128,
        "lars_epsilon": 0.0,
        "lars_opt_base_learning_rate": 21.2,
        "lars_opt_end_learning_rate": 0.0001,
        "lars_opt_learning_rate_decay_poly_power": 2.0,
        "lars_opt_learning_rate_decay_steps": 2267,
        "lars_opt_learning_rate_warmup_epochs": 16,
        "lars_opt_momentum": 0.94,
        "lars_opt_weight_decay": 2.5e-5,
    }
    assert wanted.items() <= found.items()


def test_nothing_is_claimed_that_the_run_does_not_have():
    config = load("digits")
    found = dict(settings(facts(config, ranks=2)))
    assert found["submission_benchmark"] == "digits"
    assert "submission_org" not in found
    assert not [key for key in found if key.startswith("lars")]
    assert "sgd_opt_learning_rate_decay_poly_power" not in found, "the decay is a cosine"
    assert found["sgd_opt_learning_rate_decay_steps"] == 24 * (1_281_167 // 60)


def test_the_span_of_a_batch_norm():
    config = replace(load("imagenet-resnet50-32k"), batch=4096, micro_batch=32)
    for norms, span in ((BatchNormConfig(), 32), (BatchNormConfig(statistics="shared", group=4), 128)):
        assert batchnorm_span(facts(replace(config, model=replace(config.model, batchnorm=norms)))) == span
    shared = replace(config.model, batchnorm=BatchNormConfig(statistics="shared"))
    assert batchnorm_span(facts(replace(config, model=shared))) == 64 * 32


def test_the_file_has_what_standard_output_has(tmp_path, comm, capsys):
    config = RunConfig(name="digits", epochs=1, batch=720, mllog=True)
    train(config, comm, out=tmp_path, show=False)
    assert lines((tmp_path / "mllog.txt").read_text()) == lines(capsys.readouterr().out)


def test_a_run_that_raises_is_aborted(tmp_path, comm, capsys, monkeypatch):
    monkeypatch.setattr("phalanx.train.loop.Trainer.evaluate", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(RunConfig(name="digits", epochs=1, batch=720, mllog=True), comm, out=tmp_path, show=False)
    assert lines((tmp_path / "mllog.txt").read_text())[-1]["metadata"] == {"status": "aborted"}


def test_a_report_that_fails_is_told_and_does_not_fail_the_run(tmp_path, comm):
    (tmp_path / "report.html").mkdir()
    with pytest.warns(UserWarning, match=r"no report .*phalanx report"):
        result = train(RunConfig(name="digits", epochs=1, batch=720), comm, out=tmp_path, show=False)
    assert result.why == "epochs"
