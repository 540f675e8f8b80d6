"""`phalanx show-lr`: a recipe's rate as a plot, a table, JSON and SVG."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest

from phalanx.cli.main import main
from phalanx.cli.train import load, recipe_names

IMAGENET = ["--samples", "1281167"]


@pytest.fixture(autouse=True)
def _terminal_of_60_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")


def shown(capsys, *words):
    assert main(["show-lr", *words]) == 0
    return capsys.readouterr().out


def table(out):
    """The last part of what is shown, as rows of words."""
    return [line.replace(",", "").split() for line in out.split("\n\n")[-1].splitlines()]


def test_the_plot_is_as_high_as_the_rate(capsys):
    """A constant rate fills the plot; one that falls to zero fills half of it."""

    def filled(decay):
        plot = shown(capsys, "digits", "--set", "rate.warmup=0", "--set", f"rate.decay={decay}").split("\n\n")[1]
        lines = plot.splitlines()
        assert max(map(len, lines)) <= 60
        assert float(lines[0].split()[0]) == pytest.approx(0.1, rel=0.01)  # the first step of 552 has begun to fall
        assert lines[-1].split() == ["0", "12", "24", "epochs"]
        return sum(line.count("█") for line in lines) / (10 * lines[-2].count("─"))

    assert filled("constant") == 1
    assert filled("linear") == pytest.approx(0.5, abs=0.06)


def test_the_table_has_the_steps_where_something_changes(capsys):
    out = shown(capsys, "imagenet-sony-flash", *IMAGENET)
    assert out.startswith("imagenet-sony-flash: 30 epochs of batch 34,816 then 60 epochs of batch 69,632; 2,160 steps")
    rows = table(out)
    assert rows[0] == ["step", "epoch", "batch", "rate", "momentum"]
    assert ["180", "5", "34816", "21.2", "0.94"] in rows
    numbers = [int(row[0]) for row in rows[1:]]
    assert numbers == sorted(set(numbers))
    assert {1, 1080, 1081, 2160} <= set(numbers)
    batches = {int(row[0]): row[2] for row in rows[1:]}
    assert (batches[1080], batches[1081]) == ("34816", "69632")


def test_without_the_data_there_are_no_steps(capsys):
    out = shown(capsys, "imagenet-sony-flash", "--set", "data.source=imagefolder:nowhere")
    assert "the data are not here: use --samples N to count steps" in out
    rows = table(out)
    assert rows[0] == ["epoch", "batch", "rate", "momentum"]
    assert ["5", "34816", "21.2", "0.94"] in rows
    assert [row[1] for row in rows if row[0] == "30"] == ["34816", "69632"]


@pytest.mark.parametrize("name", [name for name in recipe_names() if "imagenet" in name])
def test_json_is_the_course(capsys, name):
    told = json.loads(shown(capsys, name, *IMAGENET, "--json"))
    config = load(name)
    assert (told["recipe"], told["samples"]) == (name, 1281167)
    for step in told["steps"][:: len(told["steps"]) // 7]:
        wanted = config.course.at_step(step["number"], 1281167, config.data.last)
        assert step == {
            "number": wanted.number,
            "progress": wanted.progress,
            "batch": wanted.batch,
            "rate": wanted.rate,
            "momentum": wanted.momentum,
        }
    assert told["steps"][-1]["progress"] == config.epochs


def test_the_picture(capsys, tmp_path):
    shown(capsys, "digits", "--svg", str(tmp_path / "rate.svg"))
    root = ET.fromstring((tmp_path / "rate.svg").read_text(encoding="utf-8"))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    (series,) = (group for group in root.iter("{http://www.w3.org/2000/svg}g") if "data-y" in group.attrib)
    rates = [float(number) for number in series.get("data-y").split()]
    assert max(rates) == pytest.approx(0.1)
    assert rates[-1] == 0
    assert "prefers-color-scheme: dark" in root.find("{http://www.w3.org/2000/svg}style").text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("digit", "neither a recipe nor a file"),
        ("digits --set rate.peek=1", "rate.peak?"),
        ("digits --set rate.warmup=24", "use a smaller rate.warmup"),
        ("digits --samples 0", "--samples: '0' is not a whole number of at least 1"),
        ("digits --samples 59", "59 samples do not fill a batch of 60"),
        ("digits --svg nowhere/rate.svg", "cannot write nowhere/rate.svg"),
    ],
)
def test_slips_end_with_one_line(capsys, words, told):
    assert main(["show-lr", *words.split()]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1
