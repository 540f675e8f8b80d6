"""`phalanx plan` as people ask it: within a time, for a budget, what if; and inputs that cannot be."""

import json
import re

import pytest

from phalanx.cli.main import main
from phalanx.cli.plan_goals import hours
from phalanx.cluster import MODELS
from phalanx.cluster.training import epochs_for, largest_batch
from phalanx.cluster.transformers import TRANSFORMERS, Shape, transformer
from phalanx.schedule import ring, to_json, torus

RING = ["--algorithm", "ring", "--group", "64"]


def said(capsys, *args, code=0):
    assert main(["plan", *args]) == code
    out = capsys.readouterr()
    return out.out if code == 0 else out.err


def test_within_a_time_the_fewest_hosts_are_found(capsys, tmp_path):
    text = said(capsys, "--cluster", "dgx-1", "--within", "15min", *RING, "--json", str(tmp_path / "answer"))
    answer = json.loads((tmp_path / "answer").read_text())
    chosen, seen = answer["chosen"], answer["looked_at"]
    assert chosen["hours"] <= 0.25
    assert all(option["hours"] > 0.25 for option in seen if option["hosts"] < chosen["hosts"])
    assert f"{chosen['hosts']} hosts, {chosen['devices']} devices" in text
    assert chosen["batch"] <= 208 * chosen["devices"]
    for source in ("208 samples per device", "MLPerf Training v0.6", "reference convergence points", "assumes"):
        assert source in " ".join(text.split())
    more = re.search(r"phalanx plan (--cluster \S+ --ranks \S+ --batch \S+)", " ".join(text.split()))
    plan = said(capsys, *more[1].split(), *RING)
    assert "V100" in plan


def test_a_budget_buys_the_fastest_run_it_can(capsys, tmp_path):
    said(capsys, "--cluster", "dgx-1", "--budget", "12", "--price", "1", *RING, "--json", str(tmp_path / "answer"))
    answer = json.loads((tmp_path / "answer").read_text())
    paid = [option for option in answer["looked_at"] if option["cost"] <= 12]
    assert answer["chosen"] == min(paid, key=lambda option: option["hours"])
    assert any(option["cost"] > 12 for option in answer["looked_at"])
    assert answer["chosen"]["cost"] == pytest.approx(answer["chosen"]["device_hours"])


def test_what_cannot_be_had_is_refused_with_the_nearest(capsys):
    text = said(capsys, "--cluster", "dgx-1", "--within", "1s", *RING, code=2)
    assert "the least is" in text
    assert "208 samples per device" in text
    assert "--device-batch is missing" in said(
        capsys, "--cluster", "dgx-1", "--model", "vgg16", "--rate", "300@64", "--epochs", "90", "--within", "1h", code=2
    )
    assert "two questions" in said(capsys, "--cluster", "dgx-1", "--within", "1h", "--budget", "3", code=2)
    assert "leave it out" in said(capsys, "--cluster", "dgx-1", "--within", "1h", "--ranks", "8", code=2)


def test_durations():
    assert [hours(text) for text in ("90s", "30min", "30m", "1h", "1.5h", "2d")] == [0.025, 0.5, 0.5, 1.0, 1.5, 48.0]
    assert main(["plan", "--cluster", "lab", "--within", "soon"]) == 2


def test_accuracies_that_were_published():
    assert epochs_for(8192, 76.3)[0] == 90
    assert "Goyal" in epochs_for(4096, 76.0)[1]
    assert epochs_for(8192, 75.9) == epochs_for(8192)
    assert "Yamazaki" in epochs_for(81920, 75.0)[1]
    assert (largest_batch(76.0), largest_batch(), largest_batch(75.0)) == (8192, 67840, 81920)
    with pytest.raises(ValueError, match="no published run"):
        epochs_for(32768, 76.3)
    with pytest.raises(ValueError, match=r"reached 77 %.*Goyal"):
        largest_batch(77)


def test_what_if_plans_again(capsys, tmp_path):
    ask = ["--cluster", "cloud-10g", "--ranks", "16", "--batch", "512", *RING]
    said(capsys, *ask, "--what-if", "network=0.5", "--what-if", "device=2", "--json", str(tmp_path / "plan"))
    plan = json.loads((tmp_path / "plan").read_text())
    slower, faster = plan["what_if"]
    assert (slower["asked"], faster["asked"]) == ("network x0.5", "device x2")
    assert slower["step_s"] > plan["step_s"] > faster["step_s"]
    assert "not an input of a plan" in said(capsys, *ask, "--what-if", "weather=2", code=2)
    assert "has no uplink" in said(capsys, *ask, "--what-if", "uplink=2", code=2)


def test_a_schedule_of_your_own_is_priced_beside_the_others(capsys, tmp_path):
    (tmp_path / "mine.json").write_text(to_json(torus(4, 4)))
    ask = ["--cluster", "dgx-1", "--ranks", "16", "--batch", "512", "--json", str(tmp_path / "plan")]
    text = said(capsys, *ask, "--algorithm", str(tmp_path / "mine.json"))
    assert "mine.json" in text
    mine = json.loads((tmp_path / "plan").read_text())["step_s"]
    said(capsys, *ask, "--algorithm", "torus")
    tori = [c for c in json.loads((tmp_path / "plan").read_text())["candidates"] if c["schedule"] == "torus:4x4"]
    assert mine == pytest.approx(min(c["step_s"] for c in tori), rel=0.02)
    (tmp_path / "small.json").write_text(to_json(ring(4)))
    assert "16" in said(capsys, *ask, "--algorithm", str(tmp_path / "small.json"), code=2)
    assert "neither a file nor one of" in said(capsys, *ask, "--algorithm", "spiral", code=2)


@pytest.mark.parametrize("mtbf", ["0.001", "1"])
def test_hosts_that_always_fail_do_not_train(capsys, mtbf):
    text = said(capsys, "--cluster", "abci", "--batch", "81920", *RING, "--mtbf", mtbf, code=2)
    assert "it would never end" in text
    assert "--restart" in text


def test_jitter_is_in_the_rate(capsys, tmp_path):
    ask = ["--cluster", "dgx-1", "--ranks", "16", "--batch", "512", *RING, "--json", str(tmp_path / "plan")]
    said(capsys, *ask)
    steady = json.loads((tmp_path / "plan").read_text())["samples_per_s"]
    said(capsys, *ask, "--jitter", "0.5")
    shaken = json.loads((tmp_path / "plan").read_text())
    assert shaken["samples_per_s"] < steady / 1.5
    assert shaken["samples_per_s"] == pytest.approx(512 / shaken["mean_s"])


def test_two_rates_that_no_device_has_are_refused(capsys):
    ask = ["--cluster", "dgx-1", "--batch", "256", *RING]
    assert "swapped" in said(capsys, *ask, "--rate", "100@400", "--rate", "3000@32", code=2)
    assert "256 (32 each)" in said(capsys, *ask, "--rate", "1403@208", "--rate", "900@32")


def test_what_is_assumed_stands_above_the_answer(capsys):
    text = said(capsys, "--cluster", "cloud-25g", "--ranks", "16", "--batch", "512", *RING)
    assert text.index("V100 (16 GB)") < text.index("best ")
    text = said(capsys, "--cluster", "dgx-h100", "--ranks", "16", "--batch", "512", *RING)
    assert "MLPerf Training v3.0" in " ".join(text.split())


def test_lines_fit_and_names_are_those_of_people(capsys):
    text = said(capsys, "--cluster", "dgx-1", "--ranks", "16", "--batch", "512")
    assert max(map(len, text.splitlines())) <= 100
    assert "NCCL's own all-reduce" in text
    assert "ring:16" not in text
    assert not re.search(r" 0\.0%  ", text)


@pytest.mark.parametrize(("name", "millions"), [("gpt2", 124.4), ("gpt2-xl", 1557.6), ("llama-7b", 6738.4)])
def test_transformers_have_their_parameters_and_operations(name, millions):
    model = TRANSFORMERS[name]
    assert model.elements / 1e6 == pytest.approx(millions, abs=0.1)
    assert sum(tensor.work for tensor in model.tensors) == pytest.approx(1)
    # 6 per parameter that multiplies and token, and attention beside
    assert model.flops / (6 * model.elements * model.tokens) == pytest.approx(1.0, abs=0.2)


def test_a_transformer_has_no_epochs_of_resnet(capsys):
    ask = ["--cluster", "dgx-a100", "--ranks", "8", "--model", "gpt2", "--batch", "64", *RING]
    text = said(capsys, *ask)
    assert "training  unknown" in text
    assert "40% of its 312 Tflop/s: assumption" in " ".join(text.split())
    assert "1.0 epochs" in said(capsys, *ask, "--epochs", "1")
    assert "--epochs is missing" in said(capsys, *ask, "--price", "2", code=2)
    text = said(capsys, "--cluster", "dgx-1", "--model", "llama-7b", "--batch", "64", *RING)
    assert "divide the model first" in " ".join(text.split())
    own = transformer("mine", Shape(layers=2, width=64, hidden=256, vocabulary=100, tokens=16), samples=1000)
    assert own.elements == 100 * 64 + 2 * (4 * 64 * 64 + 2 * 64 * 256 + 2 * 64) + 64
    assert MODELS["resnet50"].flops == 0


# ---- what saves bytes --------------------------------------------------------------------------------------------------------

SLOW = [
    "plan",
    "--cluster",
    "lab",
    "--backend",
    "shm+gloo",
    "--batch",
    "16",
    "--rate",
    "7@2",
    "--group",
    "25",
    "--wire",
    "float32",
]


def test_techniques_are_priced_and_one_is_recommended(tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert main([*SLOW, "--techniques", "--every", "20", "--low-rank", "2", "--low-rank", "4", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    rows = json.loads(path.read_text())["techniques"]
    assert {"float32", "Int8", "PowerSGD rank 2", "PowerSGD rank 4", "LocalSGD H=20", "gossip exact"} <= {r["name"] for r in rows}
    (best,) = [row for row in rows if row["recommended"]]
    assert f"take      {best['option']}" in out
    assert best["keeps_accuracy"]
    assert "rests on" in out
    assert "not measured" in out
    assert "techniques" not in [line.split()[0] for line in out.splitlines() if line.startswith("note")]


@pytest.mark.parametrize("option", [["--every", "7"], ["--low-rank", "2"], ["--may-lose", "0"]])
def test_an_option_of_techniques_without_them(option, capsys):
    assert main(["plan", "--cluster", "cloud-10g", "--ranks", "16", "--batch", "1024", *option]) == 2
    assert f"{option[0]} has no effect without --techniques" in capsys.readouterr().err


def test_accuracy_that_may_be_lost_changes_the_advice(tmp_path):
    def keeps(points):
        path = tmp_path / "plan.json"
        assert main([*SLOW, "--techniques", "--may-lose", points, "--json", str(path)]) == 0
        return {row["name"]: row["keeps_accuracy"] for row in json.loads(path.read_text())["techniques"]}

    assert keeps("2")["gossip"] is True
    assert keeps("0.1")["gossip"] is False


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["--techniques", "--double-buffering"], "double buffering"),
        (["--techniques", "--ranks", "2"], "one host"),
        (["--techniques", "--within", "1h"], "--techniques"),
        (["--techniques", "--every", "0"], "--every"),
    ],
    ids=lambda x: str(x),
)
def test_wrong_questions_about_techniques(line, words, capsys):
    assert main([*SLOW, *line]) == 2
    assert words in capsys.readouterr().err
