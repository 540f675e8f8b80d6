"""MLPerf's lines: one JSON object each, in the order that a submission wants; TensorBoard's scalars; and a report that fails."""

import importlib.util
import json

import pytest

from phalanx.train.config import ConfigError, RunConfig
from phalanx.train.tensorboard import check_tensorboard
from phalanx.train.trainer import train

INSTALLED = importlib.util.find_spec("tensorboard") is not None


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


@pytest.mark.skipif(not INSTALLED, reason="needs tensorboard: pip install tensorboard")
def test_tensorboard_reads_the_scalars(tmp_path, comm):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(RunConfig(name="digits", epochs=1, batch=480, tensorboard=True, log_every=1), comm, out=tmp_path, show=False)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (found,) = [row["top1"] for row in rows if row["kind"] == "evaluation"]
    assert events.Scalars("test/top-1")[0].value == pytest.approx(found)


@pytest.mark.skipif(INSTALLED, reason="tensorboard is installed")
def test_without_tensorboard_nothing_is_trained(comm):
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        check_tensorboard()
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        train(RunConfig(name="digits", tensorboard=True), comm, show=False)


def test_a_report_that_fails_is_told_and_does_not_fail_the_run(tmp_path, comm):
    (tmp_path / "report.html").mkdir()
    with pytest.warns(UserWarning, match=r"no report .*phalanx report"):
        result = train(RunConfig(name="digits", epochs=1, batch=720), comm, out=tmp_path, show=False)
    assert result.why == "epochs"
