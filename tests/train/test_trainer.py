"""The trainer: N ranks equal one, whatever the options; numbers are those of all samples; a resumed run is the same run.

Ranks are threads here; what needs processes, for their environment or to be killed, is in tests/world.
"""

import dataclasses
from dataclasses import dataclass, replace

import pytest
import torch
from tests.long import often, only_long, times
from tests.train.runs import DIGITS, TINY, InterruptedRunError, distance, on_trainer, rows, run, same
from tests.train.runs import weights as weights_of

import phalanx
from phalanx.data import Stage, epoch_order
from phalanx.data.image import BadSample
from phalanx.train.checkpoint import CheckpointError
from phalanx.train.config import ConfigError
from phalanx.train.samples import DataConfig
from phalanx.train.trainer import device_of_this_rank, train
from phalanx.train.update import CommConfig, OptimizerConfig, RateConfig


@pytest.fixture(scope="module")
def alone():
    """One rank with the whole batch: the stupid oracle."""
    return run(TINY)


def test_a_rank_that_sees_one_gpu_trains_on_it(monkeypatch):
    """Its index is 0, whatever the local rank is."""
    assert device_of_this_rank() == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for current in (0, 3):
        monkeypatch.setattr(torch.cuda, "current_device", lambda current=current: current)
        assert device_of_this_rank() == torch.device("cuda", current)


def changed(config, **parts):
    """`config` with settings changed inside its parts: changed(TINY, model={"width": 8}, batch=60)."""
    return replace(
        config,
        **{name: replace(getattr(config, name), **value) if isinstance(value, dict) else value for name, value in parts.items()},
    )


@pytest.mark.parametrize("ranks", [3, *often(2)])
def test_ranks_equal_one_process(alone, ranks):
    result, weights = run(TINY, ranks)
    assert (result.steps, result.epochs, result.why) == (22, 2, "epochs")
    assert result.loss == pytest.approx(alone[0].loss, rel=1e-3)
    assert distance(weights, alone[1]) < 1e-4
    assert distance(weights, run(replace(TINY, seed=1))[1]) > 0.05, "another run would pass, too"


@pytest.mark.parametrize(
    ("changes", "off"),
    [
        ({"micro_batch": 7, "batch": 126}, 1e-4),
        *often(
            ({"label_smoothing": 0.1}, 1e-4), ({"model": {"channels_last": True}}, 1e-4), ({"comm": {"wire": "bfloat16"}}, 0.02)
        ),
        ({"comm": {"growing": 2, "overlap": True}}, 1e-4),
        ({"comm": {"double_buffering": True}}, 1e-4),
        ({"optimizer": {"name": "lars", "trust_coefficient": 0.02}, "rate": {"peak": 1.0}}, 1e-3),
        ({"epochs": 2, "stages": (Stage(1, 120), Stage(1, 240))}, 1e-4),
    ],
    ids=str,
)
def test_options_equal_one_process(changes, off):
    config = changed(replace(TINY, epochs=1), **changes)
    result, weights = run(config, 2)
    plain = replace(config, micro_batch=None, model=replace(config.model, channels_last=False))
    one = run(plain)
    assert result.steps == one[0].steps
    assert distance(weights, one[1]) < off
    untrained = on_trainer(plain, 1, lambda trainer: weights_of(trainer.model))[0]
    assert distance(weights, untrained) > 2 * off, "a run that does nothing would pass, too"


def test_any_algorithm(alone):
    assert distance(run(TINY, 3, algorithm=phalanx.ring(3))[1], alone[1]) < 1e-4


@only_long
def test_compiled(monkeypatch):
    """The compiled network is what runs; torch's own compiler takes half a minute, so the one that changes nothing does it."""
    compiled = []

    def eager(graph, inputs):
        compiled.append(graph)
        return graph.forward

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: compile_(model, backend=eager))
    _, weights = run(changed(TINY, epochs=1, rate={"warmup": 0.0}, model={"compile": True}))
    assert compiled
    assert distance(weights, run(changed(TINY, epochs=1, rate={"warmup": 0.0}))[1]) < 1e-4
    assert not any(name.startswith("_orig_mod") for name in weights)


# ---- numbers -----------------------------------------------------------------------------------------------------------------


def test_metrics_are_means_over_all_samples(tmp_path):
    """The first step has the same weights on any number of ranks, so its loss and accuracy are the same, too."""
    config = replace(TINY, epochs=1, log_every=1, batch=126, rate=RateConfig(peak=0.05))
    first = {}
    for ranks in (1, 2, 3):
        run(config, ranks, tmp_path / str(ranks))
        told = rows(tmp_path / str(ranks), "interval")
        assert [row["step"] for row in told] == list(range(1, 12))
        first[ranks] = told[0]
    own = on_trainer(config, 3, _own_accuracy)
    for row in first.values():
        assert row["accuracy"] == first[1]["accuracy"]
        assert row["loss"] == pytest.approx(first[1]["loss"], rel=1e-6)
    assert own[0] != pytest.approx(first[1]["accuracy"]), "rank 0's own would pass, too"
    assert sum(own) / 3 == pytest.approx(first[1]["accuracy"])


def _own_accuracy(trainer):
    x, y = next(trainer.loader.steps()).micro[0]
    return float((trainer.model(x).argmax(1) == y).double().mean())


def test_evaluation_is_exact_with_uneven_shards():
    """360 samples in batches of 7 per rank: the last batch leaves some ranks with fewer, or none."""

    def act(trainer):
        trainer.evaluate()
        return tuple(trainer.position.found[key] for key in ("top1", "top5", "loss"))

    one = on_trainer(replace(TINY, data=replace(DIGITS, test_batch=360)), 1, act)[0]
    for ranks in (2, 3, 5):
        told = on_trainer(changed(TINY, batch=120, data={"test_batch": 7 * ranks}), ranks, act)
        assert all(own[:2] == one[:2] for own in told)
        assert told[0][2] == pytest.approx(one[2], rel=1e-6)


def test_the_target_ends_all_ranks_alike(tmp_path):
    epochs = times(8, seldom=5)
    config = replace(TINY, epochs=epochs, target=0.3)
    result, _ = run(config, 3, tmp_path)
    assert result.why == "target"
    assert result.epochs < epochs
    assert result.top1 >= 0.3
    told = rows(tmp_path, "evaluation")
    assert all(row["top1"] < 0.3 for row in told[:-1])
    assert rows(tmp_path, "end")[-1]["why"] == "target"
    again, _ = run(config, 3, tmp_path, resume=True)
    assert (again.why, again.steps) == ("target", result.steps)
    further, _ = run(replace(config, target=None), 3, tmp_path, resume=True)
    assert (further.why, further.epochs) == ("epochs", epochs)


def test_evaluation_every_k_epochs_and_at_the_end(tmp_path):
    run(replace(TINY, epochs=5, evaluate_every=2, checkpoint_every=3), 1, tmp_path)
    assert [row["epoch"] for row in rows(tmp_path, "evaluation")] == [2, 4, 5]
    assert [path.name for path in sorted((tmp_path / "checkpoints").glob("step*"))] == ["step-000000033", "step-000000055"]


def test_the_batch_changes_in_mid_run(tmp_path):
    run(replace(TINY, stages=(Stage(1, 120), Stage(1, 240)), log_every=1), 2, tmp_path)
    assert [row["batch"] for row in rows(tmp_path, "interval")] == [120] * 11 + [240] * 5


# ---- samples that cannot be read ----------------------------------------------------------------------------------------------


class Torn:
    """Digits, some of which cannot be read."""

    def __init__(self, source, bad):
        self.source, self.bad, self.classes = source, bad, source.classes

    def __len__(self):
        return len(self.source)

    def __getitem__(self, i):
        if i in self.bad:
            raise BadSample("", "torn")
        return self.source[i]


@dataclass(frozen=True, kw_only=True)
class TornDigits(DataConfig):
    """The data of a run that has some of those."""

    bad: tuple[int, ...] = ()

    def open(self, split):
        return Torn(super().open(split), set(self.bad) if split == "train" else set())


@pytest.mark.filterwarnings("ignore:epoch", "ignore:rank 0. no gradient")
@pytest.mark.parametrize("micro_batch", [None, 20])
def test_bad_samples_are_left_out_of_the_mean(micro_batch):
    """In the first step rank 0 has no sample at all, in the second a third of them."""
    order = epoch_order(0, 0, 1437)
    bad = tuple(int(i) for i in (*order[:60], *order[120:140]))
    data = TornDigits(**dataclasses.asdict(DIGITS) | {"on_bad": "skip"}, bad=bad)
    config = replace(TINY, epochs=1, rate=RateConfig(peak=0.05), data=data, micro_batch=micro_batch)
    one = run(replace(config, micro_batch=None))
    assert distance(run(config, 2)[1], one[1]) < 1e-4
    assert distance(run(replace(config, data=DIGITS), 2)[1], one[1]) > 1e-3, "a run with all samples would pass, too"


# ---- resuming ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"comm": {"double_buffering": True, "wire": "bfloat16"}},
        *often({"model": {"name": "resnet_cifar", "width": None, "depth": 8}, "epochs": 1, "rate": {"warmup": 0.0}}),
        *often({}, {"optimizer": {"name": "lars"}, "rate": {"peak": 1.0}}),
    ],
    ids=str,
)
def test_a_resumed_run_ends_bit_for_bit_as_if_undisturbed(tmp_path, changes):
    config = changed(TINY, **changes, checkpoint_every_steps=4)
    whole = run(config, 2, tmp_path / "whole")
    out = tmp_path / "cut"
    with pytest.raises(InterruptedRunError):
        run(config, 2, out, interrupt=6)
    result, weights = run(config, 2, out, resume=True)
    assert same(weights, whole[1])
    assert result.steps == whole[0].steps
    assert [row["step"] for row in rows(out, "start")] == [0, 4]
    for kind in ("interval", "evaluation"):
        assert _without_times(rows(out, kind)) == _without_times(rows(tmp_path / "whole", kind))


def _without_times(told):
    return [{name: row[name] for name in row if name in ("step", "epoch", "loss", "accuracy", "top1", "rate")} for row in told]


@pytest.mark.filterwarnings("ignore:epoch")
@only_long
def test_resuming_with_bad_samples(tmp_path):
    data = TornDigits(**dataclasses.asdict(DIGITS) | {"on_bad": "skip"}, bad=tuple(range(3, 1437, 7)))
    config = replace(TINY, data=data, checkpoint_every_steps=4)
    whole = run(config, 2, tmp_path / "whole")
    with pytest.raises(InterruptedRunError):
        run(config, 2, tmp_path / "cut", interrupt=6)
    assert same(run(config, 2, tmp_path / "cut", resume=True)[1], whole[1])


def test_resuming_on_another_number_of_ranks(tmp_path, alone):
    with pytest.raises(InterruptedRunError):
        run(replace(TINY, checkpoint_every_steps=4), 2, tmp_path, interrupt=6)
    result, weights = run(TINY, 3, tmp_path, resume=True)
    assert result.steps == 22
    assert distance(weights, alone[1]) < 1e-4


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    run(replace(TINY, epochs=1, rate=RateConfig()), 2, tmp_path)
    with pytest.raises(CheckpointError, match=r"config.optimizer.momentum: 0.9 in the checkpoint, 0.8 here"):
        run(replace(TINY, epochs=1, rate=RateConfig(), optimizer=OptimizerConfig(momentum=0.8)), 2, tmp_path, resume=True)
    run(replace(TINY, epochs=1, rate=RateConfig(), log_every=3, comm=CommConfig(overlap=False)), 2, tmp_path, resume=True)


# ---- what cannot be trained ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"batch": 121}, "121"),
        ({"batch": 2000}, "1437 samples"),
        (
            {"model": {"name": "resnet9"}, "data": {"source": "synthetic:1x4x4,classes=10"}},
            "resnet9 does not take images of 1 x 4 x 4",
        ),
        ({"data": {"mean": (0.5, 0.5), "std": (1.0, 1.0)}}, "one for each channel"),
        ({"rate": {"warmup": 2}}, "use a smaller rate.warmup"),
    ],
)
def test_parts_that_do_not_fit_together(changes, told):
    with pytest.raises(ConfigError, match=told):
        run(changed(TINY, **changes), 2)


def test_the_public_way(tmp_path, capsys):
    results = phalanx.run_local(2, lambda comm: train(replace(TINY, epochs=1, rate=RateConfig()), comm, out=tmp_path))
    assert dataclasses.replace(results[0], seconds=0) == dataclasses.replace(results[1], seconds=0)
    assert {"config.json", "environment.json", "metrics.jsonl", "checkpoints"} <= {path.name for path in tmp_path.iterdir()}
    assert f"test accuracy {results[0].top1:.4f}" in capsys.readouterr().out
