"""Runs whose rows go to TensorBoard, Weights & Biases (offline) and MLflow (a directory), read back by their own readers."""

from __future__ import annotations

import json
import struct
from dataclasses import replace

import pytest
from tests.train.runs import TINY

import phalanx
from phalanx.train.rows import read_rows
from phalanx.train.trainer import train

# their own use of old names is not ours to repair
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

CONFIG = replace(TINY, epochs=2, log_every=4)


@pytest.fixture
def comm():
    with phalanx.create_communicator() as comm:
        yield comm


def rows(out, kind):
    return [row for row in read_rows(out / "metrics.jsonl") if row["kind"] == kind]


def test_tensorboard(tmp_path, comm):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(replace(CONFIG, tensorboard=True), comm, out=tmp_path, show=False)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    intervals, evaluations = rows(tmp_path, "interval"), rows(tmp_path, "evaluation")
    losses = events.Scalars("train/loss")
    assert [event.step for event in losses] == [row["step"] for row in intervals]
    assert [event.value for event in losses] == pytest.approx([row["loss"] for row in intervals])
    assert [event.value for event in events.Scalars("test/top-1")] == pytest.approx([row["top1"] for row in evaluations])
    assert "speed/images per second" in events.Tags()["scalars"]


def test_mlflow(tmp_path, comm):
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    uri = f"file:{tmp_path / 'store'}"
    config = replace(CONFIG, mlflow=uri)
    out = tmp_path / "run"
    train(replace(config, target=0.01), comm, out=out, show=False)  # ends after the first epoch
    client = MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("tiny").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "run"
    assert run.data.params["model.width"] == "4"
    assert run.data.params["ranks"] == "1"
    train(config, comm, out=out, resume=True, show=False)
    (again,) = client.search_runs([run.info.experiment_id])
    assert again.info.run_id == run.info.run_id, "a resumed run continues there"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    intervals = rows(out, "interval")
    assert [(point.step, point.value) for point in history] == [(row["step"], row["loss"]) for row in intervals]
    accuracy = client.get_metric_history(run.info.run_id, "test/top-1")
    assert [point.value for point in accuracy] == [row["top1"] for row in rows(out, "evaluation")]


def log_records(data):
    """The records of a file of wandb: a header of 7 bytes, then the log format of LevelDB, in blocks of 32 KiB."""
    assert data[:4] == b":W&B"
    place, parts = 7, b""
    while place + 7 <= len(data):
        left = (1 << 15) - place % (1 << 15)
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        if left < 7 or kind == 0:  # the rest of a block
            place += left
            continue
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def test_wandb(tmp_path, comm, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    train(replace(CONFIG, wandb="team/digits"), comm, out=tmp_path, show=False)
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    losses, projects = [], set()
    for data in log_records(file.read_bytes()):
        record = Record.FromString(data)
        if record.HasField("run"):
            projects.add((record.run.entity, record.run.project, record.run.run_id))
        items = {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
        if "train/loss" in items:
            losses.append((items["step"], items["train/loss"]))
    assert losses == [(row["step"], row["loss"]) for row in rows(tmp_path, "interval")]
    known = json.loads((tmp_path / "tracking.json").read_text())["wandb"]
    assert projects == {("team", "digits", known)}


@pytest.mark.parametrize(
    ("package", "setting", "words"),
    [
        ("mlflow", {"mlflow": "http://127.0.0.1:9"}, "mlflow fails, and training continues without it"),
        ("wandb", {"wandb": "digits"}, "wandb fails, and training continues without it: RuntimeError: you are not logged in"),
    ],
)
def test_a_server_that_is_not_there_costs_a_warning(tmp_path, comm, monkeypatch, package, setting, words):
    pytest.importorskip(package)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # where a login would be kept
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.warns(RuntimeWarning, match=words) as caught:
        result = train(replace(CONFIG, epochs=1, **setting), comm, out=tmp_path / "run", show=False)
    assert result.why == "epochs"
    assert sum(package in str(warning.message) for warning in caught) == 1
