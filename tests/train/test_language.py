"""Language modelling: numbers exact on any number of ranks, the same words everywhere, and a recipe that learns."""

import io
import math
from dataclasses import replace

import pytest
import torch
from tests.train.runs import distance, on_trainer, rows, run
from torch.nn import functional as F

import phalanx
from phalanx.cli.recipes import load
from phalanx.train.config import ConfigError, RunConfig
from phalanx.train.evaluate import combine, read_results
from phalanx.train.model import ModelConfig
from phalanx.train.progress import Progress
from phalanx.train.report import write_report
from phalanx.train.samples import DataConfig
from phalanx.train.task import Task
from phalanx.train.tasks import IGNORED, add_perplexity, language, measure_text
from phalanx.train.update import OptimizerConfig, RateConfig

TEXT = "the quick brown fox jumps over the lazy dog. " * 60


@pytest.fixture
def tiny(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return RunConfig(
        name="tiny",
        task="language",
        epochs=2,
        batch=12,
        model=ModelConfig(name="gpt", depth=1, width=16, heads=2),
        data=DataConfig(source=f"text:{tmp_path / 'text.txt'}", context=16),
        optimizer=OptimizerConfig(name="adamw"),
        rate=RateConfig(peak=1e-2),
    )


def test_ranks_equal_one_process(tiny):
    one, two = run(tiny), run(tiny, 2)
    assert two[0].loss == pytest.approx(one[0].loss, rel=1e-3)
    assert distance(two[1], one[1]) < 2e-3
    assert two[0].loss < math.log(len(set(TEXT))) - 0.3, "it learns"


def test_evaluation_is_exact_with_uneven_shards(tiny):
    """16 samples in batches of 3 per rank: some ranks have fewer, or none; the oracle is one sum over the whole text."""

    def act(trainer):
        trainer.evaluate()
        source = trainer.config.data.open("test")
        x, y = source.take(torch.arange(len(source)))
        with torch.no_grad():
            whole = F.cross_entropy(trainer.model.eval()(x).flatten(0, 1).double(), y.flatten()).item()
        return trainer.position.found, whole

    first = None
    for ranks in (1, 2, 3, 5):
        config = replace(tiny, batch=30, data=replace(tiny.data, test_batch=3 * ranks))
        results = on_trainer(config, ranks, act)
        found, whole = results[0]
        assert all(own[0] == found for own in results)
        assert found["loss"] == pytest.approx(whole, rel=1e-6)
        first = first or found
        assert found["loss"] == pytest.approx(first["loss"], rel=1e-7)
        assert found["perplexity"] == math.exp(found["loss"])
        assert found["bits_per_character"] == found["loss"] / math.log(2)


def test_characters_that_do_not_count():
    """Samples with different numbers of characters: the mean is over characters, not over samples or ranks."""
    torch.manual_seed(0)
    outputs, y = torch.randn(4, 6, 5), torch.randint(5, (4, 6))
    y[0, 1:] = IGNORED
    y[3] = IGNORED
    shards = [{name: (float(a), float(b)) for name, (a, b) in measure_text(outputs[i], y[i]).items()} for i in ([0], [1, 2], [3])]
    found = combine([read_results(shard) for shard in shards])["loss"]
    assert found == pytest.approx(F.cross_entropy(outputs.flatten(0, 1), y.flatten(), ignore_index=IGNORED).item(), rel=1e-6)
    assert language(0.0).loss(outputs, y).item() == pytest.approx(found, rel=1e-6)


def test_perplexity_of_anything():
    assert add_perplexity({"loss": 0.0}) == {"loss": 0.0, "perplexity": 1.0, "bits_per_character": 0.0}
    assert add_perplexity({"loss": 1e4})["perplexity"] == math.inf
    assert math.isnan(add_perplexity({"loss": math.nan})["perplexity"])


def test_the_words_are_those_of_the_task(tiny, tmp_path):
    run(replace(tiny, target=1.5, epochs=12), 2, tmp_path / "run")
    told = rows(tmp_path / "run", "interval")[-1]
    assert "accuracy" not in told
    assert told["characters_per_second"] > 0
    last = rows(tmp_path / "run", "evaluation")[-1]
    assert last["loss"] <= 1.5 < rows(tmp_path / "run", "evaluation")[0]["loss"], "the target of this task is a loss"
    write_report([tmp_path / "run"], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    for words in ("Test loss", "perplexity", "Perplexity over epochs", "Bits per character over epochs", "Characters per second"):
        assert words in page
    for words in ("Accuracy", "accuracy", "top-1", "Images"):
        assert words not in page
    stream = io.StringIO()
    progress = Progress(tiny, stream, live=False, colour=False)
    progress.interval(told, 2, 1.0)
    progress.evaluation(2, {key: last[key] for key in ("loss", "perplexity", "bits_per_character")}, 61.0)
    head, line = stream.getvalue().splitlines()
    assert head.split("  ")[-1].strip() == "left"
    for title in ("test loss", "perplexity", "bits per character", "characters/s"):
        assert title in head
    assert f"{last['loss']:.4f}" in line
    assert f"{last['perplexity']:.2f}" in line
    assert "top-1" not in head


def test_reports_of_different_tasks_side_by_side(tiny, tmp_path):
    run(replace(tiny, epochs=1), 1, tmp_path / "text")
    run(replace(load("digits"), epochs=1, rate=RateConfig(peak=0.05), model=ModelConfig(width=4)), 1, tmp_path / "digits")
    write_report([tmp_path / "text", tmp_path / "digits"], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    for words in ("Top-1", "Perplexity", "Per second", "characters", "images"):
        assert words in page


def test_gpt_tiny_is_the_recipe_that_was_promised():
    config = load("gpt-tiny")
    model = phalanx.models.gpt(depth=config.model.depth, width=config.model.width, heads=config.model.heads)
    assert len(model.blocks) == 4
    assert isinstance(config.find_task(), Task)
    assert len(config.data.open("train")) // config.batch == 434


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"task": "classification"}, "model.name=gpt: it gives 1 x 16 x"),
        ({"model": ModelConfig()}, "model.name=small_cnn does not take samples of 16: it takes images with labels"),
        ({"model": ModelConfig(name="gpt", width=6)}, "width=6 does not divide into heads=4"),
        ({"data": DataConfig(source="handbook", test="text:own.txt")}, "96 classes to train, but 3 to test"),
        ({"data": DataConfig(source="text:two.txt", test="text:own.txt")}, "have different characters: use one file"),
        ({"data": DataConfig(source="digits")}, "model.name=gpt does not take images of 1 x 8 x 8: it takes text"),
    ],
)
def test_what_is_refused(tiny, changes, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.txt").write_text("abc" * 2000)
    (tmp_path / "two.txt").write_text("abd" * 2000)
    with pytest.raises(ConfigError, match=told):
        run(replace(tiny, **changes))
