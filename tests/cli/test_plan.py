"""`phalanx plan`: answers, files, and errors that say what to do."""

import json

import pytest

from phalanx.cli.main import main

ASK = ["plan", "--cluster", "dgx-1", "--ranks", "16", "--batch", "1024", "--rate", "1400@208", "--group", "25"]


def test_an_answer_with_all_files(tmp_path, capsys):
    files = {name: tmp_path / name for name in ("json", "svg", "trace", "curve", "save-profile")}
    more = ["--jitter", "0.01", "--mtbf", "5000", "--price", "2", "--watts", "400", "--gossip"]
    assert main([*ASK, *more, *(word for name, path in files.items() for word in (f"--{name}", str(path)))]) == 0
    shown = capsys.readouterr().out
    for word in ("best ", "samples/s", "p99", "goodput", "kWh", "why", "what would change it", "note "):
        assert word in shown
    answer = json.loads(files["json"].read_text())
    assert answer["samples_per_s"] == pytest.approx(1024 / answer["step_s"])
    assert answer["run"]["schedule"].split(":")[0] in (
        "ring",
        "torus",
        "tree",
        "halving-doubling",
        "hierarchical",
        "gossip",
        "gossip-hosts",
    )
    assert files["svg"].read_text().startswith("<svg")
    assert files["curve"].read_text().startswith("<svg")
    assert json.loads(files["trace"].read_text())["traceEvents"]
    assert main([*ASK, "--profile", str(files["save-profile"])]) == 0


def test_a_preset_is_a_file_to_edit(tmp_path, capsys):
    assert main(["plan", "--show-cluster", "lab"]) == 0
    path = tmp_path / "mine.json"
    path.write_text(capsys.readouterr().out.replace('"gigabits_per_s": 0.956', '"gigabits_per_s": 9.56'))
    ask = ["--batch", "64", "--rate", "10@4", "--rate", "12@8", "--backend", "gloo", "--wire", "float32", "--group", "25"]
    steps = []
    for cluster in ("lab", str(path)):
        assert main(["plan", "--cluster", cluster, *ask, "--json", str(tmp_path / "out")]) == 0
        steps.append(json.loads((tmp_path / "out").read_text())["step_s"])
    assert steps[1] < steps[0]


NONSENSE = {
    "0": "at least 1",
    "8 --epochs -3": "a number above 0",
    "8 --price nan": "a number above 0",
    "8 --jitter -1": "from 0 to 1",
    "8 --jitter much": "from 0 to 1",
    "8 --jitter 50": "from 0 to 1",
    "8 --stragglers 2": "from 0 to 1",
    "8 --mtbf 0": "a number above 0",
    "8 --mtbf 3 --checkpoint -1": "a number of at least 0",
    "8 --overhead inf": "a number of at least 0",
}


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        (["--batch", "8", "--rate", "1@1"], "--cluster is missing"),
        (["--cluster", "nowhere", "--batch", "8", "--rate", "1@1"], "neither a file nor one of"),
        (["--cluster", "lab", "--batch", "8", "--rate", "fast"], "as in 1403@208"),
        (["--cluster", "lab", "--batch", "4", "--rate", "1@1"], "larger batch or fewer ranks"),
        (["--cluster", "dgx-1", "--ranks", "12", "--batch", "64", "--rate", "1@1"], "multiple of 8"),
        (["--cluster", "lab", "--batch", "8", "--rate", "1@1", "--rate", "2@2", "--overhead", "3"], "no effect"),
        (["--cluster", "lab", "--batch", "8", "--rate", "1@1", "--calibrate", "/nonexistent"], "No such file"),
        (["--cluster", "lab", "--batch", "8"], "--rate is missing"),
        (["--cluster", "abci", "--batch", "81920", "--model", "vgg16"], "--rate is missing"),
        (["--cluster", "lab", "--batch", "8", "--rate", "nan@1"], "as in 1403@208"),
        *((["--cluster", "lab", "--rate", "1@1", "--batch", *words.split()], fact) for words, fact in NONSENSE.items()),
    ],
)
def test_wrong_usage_says_what_would_be_right(words, fact, capsys):
    assert main(["plan", *words]) == 2
    assert fact in capsys.readouterr().err


def test_a_published_device_stands_in_for_a_rate(capsys):
    assert (
        main(["plan", "--cluster", "dgx-a100", "--ranks", "16", "--batch", "6528", "--group", "25", "--model", "resnet50"]) == 0
    )
    silent = capsys.readouterr().out
    assert "one A100 trains 3293 images/s with a batch of 408: an eighth of a DGX A100" in " ".join(silent.split())
    assert main(["plan", "--cluster", "dgx-a100", "--ranks", "16", "--batch", "6528", "--group", "25", "--rate", "3293@408"]) == 0
    told = capsys.readouterr().out
    assert [line for line in told.splitlines() if line.startswith("step")] == [
        line for line in silent.splitlines() if line.startswith("step")
    ]


@pytest.mark.parametrize(
    ("row", "fact"),
    [
        ("[1]", "line 2 is not a row"),
        ("nonsense", "line 2 is not a row"),
        ('{"contender": "phalanx ring(8)", "time_us": 3}', "line 2 of the rows: size is None"),
        ('{"contender": "phalanx ring(8)", "time_us": 0, "size": 4}', "line 2 of the rows: time_us is 0"),
    ],
)
def test_rows_that_nobody_measured_are_refused(row, fact, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(f'{{"config": {{}}}}\n{row}\n')
    assert main(["plan", "--cluster", "lab", "--batch", "8", "--rate", "1@1", "--calibrate", str(rows)]) == 2
    assert fact in capsys.readouterr().err
