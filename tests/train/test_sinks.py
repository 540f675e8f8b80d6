"""Rows go to all sinks in order; one that fails or hangs costs one warning, and neither the run nor the other sinks."""

import importlib.util
import threading
import warnings

import pytest

from phalanx.train.config import ConfigError, RunConfig
from phalanx.train.sinks import RunFacts, Sinks, check_sinks, later
from phalanx.train.sinks.scalars import scalars
from phalanx.train.sinks.tracking import recall, remember
from phalanx.train.trainer import train

DEADLINE = 60.0
INTERVAL = {
    "kind": "interval",
    "step": 10,
    "epoch": 0.5,
    "seconds": 3.0,
    "groups": 2,
    "rate": 0.1,
    "batch": 60,
    "loss": 1.5,
    "accuracy": 0.25,
    "images_per_second": 100.0,
    "times": {"input": 0.1, "wait": 0.2},
    "wait_share": 0.1,
    "overlapped_share": None,
}


def test_the_numbers_of_a_row_by_name():
    assert scalars(INTERVAL) == {
        "train/epoch": 0.5,
        "train/learning rate": 0.1,
        "train/batch": 60.0,
        "train/loss": 1.5,
        "train/accuracy": 0.25,
        "speed/images per second": 100.0,
        "step seconds/input": 0.1,
        "step seconds/wait": 0.2,
        "speed/waiting": 0.1,
    }
    assert scalars({"kind": "start", "step": 0, "ranks": 2}) == {}


def test_another_task_needs_no_change_here():
    row = {"kind": "evaluation", "step": 3, "epoch": 1, "loss": 1.0, "perplexity": 2.7, "bits_per_byte": 1.4}
    wanted = {"test/epoch": 1.0, "test/loss": 1.0, "test/perplexity": 2.7, "test/bits per byte": 1.4}
    assert scalars(row) == wanted


class Notes:
    """A sink that keeps what it gets, and raises in the call named by `fails`."""

    def __init__(self, name="notes", fails=""):
        self.name, self.fails, self.got = name, fails, []

    def _note(self, what, value):
        if what == self.fails:
            raise RuntimeError(f"{what}\nfailed")
        self.got.append((what, value))

    def begin(self, facts):
        self._note("begin", facts)

    def write(self, row):
        self._note("write", row)

    def close(self):
        self._note("close", None)


FACTS = RunFacts(RunConfig(name="run"), 2, 100, 10, {})
ALL = [("begin", FACTS), ("write", {"kind": "a"}), ("write", {"kind": "b"}), ("close", None)]


def play(sinks):
    sinks.begin(FACTS)
    sinks.write({"kind": "a"})
    sinks.write({"kind": "b"})
    sinks.close()


@pytest.mark.parametrize("server", [False, True])
@pytest.mark.parametrize("fails", ["begin", "write", "close"])
def test_one_that_fails_costs_one_warning_and_no_other_sink(server, fails):
    said = []
    sinks = Sinks(said.append)
    bad, good = Notes("bad", fails), Notes()
    (sinks.add_server if server else sinks.add)(bad)
    (sinks.add_server if server else sinks.add)(good)
    play(sinks)
    assert said == [f"bad fails, and training continues without it: RuntimeError: {fails} failed"]
    assert good.got == ALL
    assert bad.got == ALL[: {"begin": 0, "write": 1, "close": 3}[fails]]


def test_a_server_that_does_not_answer_delays_no_step(monkeypatch):
    monkeypatch.setattr(later, "PATIENCE", 0.05)
    monkeypatch.setattr(later, "WAITING", 5)
    answer, said = threading.Event(), []

    class Slow(Notes):
        def begin(self, facts):
            answer.wait(DEADLINE)

    sinks = Sinks(said.append)
    sinks.add_server(Slow("slow"))
    try:
        play(sinks)
        assert said == ["slow fails, and training continues without it: TimeoutError: the last rows did not arrive within 0.05 s"]
        said.clear()
        sinks.add_server(Slow("slow"))
        for _ in range(10):
            sinks.write({"kind": "a"})
        assert len(said) == 1
        assert "5 rows wait for it" in said[0]
    finally:
        answer.set()


@pytest.mark.parametrize("server", [False, True])
def test_a_run_survives_its_sink(comm, monkeypatch, server):
    """A sink fails on its first row, and the run is trained to the end."""
    bad = Notes("bad", "write")

    def opened(config, warn):
        sinks = Sinks(warn)
        (sinks.add_server if server else sinks.add)(bad)
        return sinks

    monkeypatch.setattr("phalanx.train.log.open_sinks", opened)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = train(RunConfig(name="digits", epochs=1, batch=720), comm, show=False)
    assert result.why == "epochs"
    assert [str(w.message) for w in caught if "bad fails" in str(w.message)] == [
        "bad fails, and training continues without it: RuntimeError: write failed"
    ]


def test_names_that_other_tools_gave_are_kept_for_a_resumed_run(tmp_path):
    def facts(*, resume):
        return RunFacts(FACTS.config, 1, 1, 1, {}, out=tmp_path, resume=resume)

    assert recall(facts(resume=True), "wandb") is None
    remember(facts(resume=False), "wandb", "abc")
    remember(facts(resume=True), "mlflow", "def")
    assert [recall(facts(resume=True), tool) for tool in ("wandb", "mlflow")] == ["abc", "def"]
    assert recall(facts(resume=False), "wandb") is None, "a new run in this directory is another run"
    (tmp_path / "tracking.json").write_text("[1")
    assert recall(facts(resume=True), "wandb") is None


@pytest.mark.parametrize("setting", [{"tensorboard": True}, {"wandb": "project"}, {"mlflow": "file:runs"}])
def test_a_missing_package_is_named_before_anything_is_trained(monkeypatch, setting):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (package,) = setting
    with pytest.raises(ConfigError, match=rf"{package}=.*pip install {package} \(or phalanx\[logging\]"):
        check_sinks(RunConfig(name="digits", **setting))
    check_sinks(RunConfig(name="digits"))
