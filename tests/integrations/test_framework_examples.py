"""The examples of each framework: one changed word and the same losses, or a few lines and gossip."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.examples.test_examples import EXAMPLES, changed_lines, losses
from tests.integrations.jobs import needs, play
from tests.world.programs.herd import ROOT, clean_environment

pytestmark = pytest.mark.usefixtures("warm_python")
ONE_WORD = {"lightning_cnn": "lightning", "fabric_cnn": "lightning", "accelerate_cnn": "accelerate", "hf_trainer": "transformers"}
GOSSIP = {"lightning_gossip": "lightning_cnn", "fabric_gossip": "fabric_cnn", "hf_trainer_gossip": "hf_trainer"}


@pytest.mark.parametrize("name", [*ONE_WORD, "ray_cnn"])
def test_one_word_changes(name):
    def words(file):
        text = re.sub(r'\A""".*?"""', "", (EXAMPLES / file).read_text(encoding="utf-8"), flags=re.DOTALL)
        return re.findall(r"\w+", text)

    before, after = words(f"{name}_before.py"), words(f"{name}.py")
    assert len(before) == len(after)
    assert [pair for pair in zip(before, after) if pair[0] != pair[1]] == [("gloo", "phalanx")]


@pytest.mark.parametrize("name", GOSSIP)
def test_gossip_takes_few_lines(name):
    assert 0 < changed_lines(f"{GOSSIP[name]}_before.py", f"{name}.py") <= 5


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(package)) for name, package in ONE_WORD.items()])
def test_the_losses_stay(name):
    with ThreadPoolExecutor() as both:  # at once: a job that starts leaves a core idle
        before, after = both.map(lambda file: losses(play([f"examples/{file}.py"])), [f"{name}_before", name])
    assert len(before) >= 3
    assert before[-1] < before[0]
    assert after == pytest.approx(before, abs=2e-6)


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(ONE_WORD[base])) for name, base in GOSSIP.items()])
def test_gossip_learns(name):
    out = play([f"examples/{name}.py"])
    assert len(losses(out)) >= 3
    assert losses(out)[-1] < losses(out)[0]
    assert "DistributedDataParallel, or something like it" not in out


@needs("ray")
@pytest.mark.skipif(not os.environ.get("PHALANX_TEST_FRAMEWORKS"), reason="a Ray cluster takes a minute: `make frameworks`")
def test_ray_train():
    def run(name):
        folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: Ray's sockets lie in it
        env = clean_environment() | {"RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        try:
            command = [sys.executable, f"examples/{name}.py", "--epochs", "2"]
            done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=170, check=False)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return set(re.findall(r"epoch +\d+ +loss (\S+)", done.stdout + done.stderr)), done.stdout + done.stderr

    with ThreadPoolExecutor() as both:
        (before, _), (after, said) = both.map(run, ["ray_cnn_before", "ray_cnn"])
    assert len(before) == 2
    assert after == before
    assert "backend phalanx" in said


@needs("kubeflow_trainer_api")
def test_the_trainjob_is_one_for_kubeflows_own_models():
    program = """
import pathlib, yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob as TrainJob
text = pathlib.Path("examples/cluster/trainjob.yaml").read_text()
job = yaml.safe_load(text)
print(TrainJob.from_dict(job).to_dict() == job)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "True\n", done.stdout + done.stderr
