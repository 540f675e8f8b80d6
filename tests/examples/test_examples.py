"""Every example runs, on one rank and on several, and what was made from a plain script computes what that computed."""

from __future__ import annotations

import contextlib
import re
import runpy
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from tests.long import only_long
from tests.world.programs.herd import ROOT, clean_environment

pytestmark = pytest.mark.usefixtures("warm_python")
EXAMPLES = ROOT / "examples"
DEADLINE = 60.0  # seconds for one job, which imports torch in each rank


@pytest.fixture
def alone(monkeypatch, capsys):
    """Run an example in this process, as `python FILE` does; returns what it printed."""
    before = torch.get_rng_state()

    def run(name: str, *args: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, args)])
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    yield run
    torch.set_rng_state(before)


def on_ranks(n: int, name: str, *args: object) -> str:
    """Run an example under torchrun; returns what its ranks printed."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}"]
    command = [*torchrun, str(EXAMPLES / name), *map(str, args)]
    env = clean_environment() | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=env, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        out, err = process.communicate(timeout=DEADLINE)
    finally:
        process.terminate()  # torchrun takes its ranks with it
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=10)
        process.kill()
    assert process.returncode == 0, f"{command} ended with {process.returncode}\n{out}\n{err}"
    return out


def losses(out: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", out)]


def changed_lines(before: str, after: str) -> int:
    """How many lines of code the second script has that the first has not; docstring and comments aside."""

    def code(name: str) -> list[str]:
        text = re.sub(r'\A""".*?"""', "", (EXAMPLES / name).read_text(encoding="utf-8"), flags=re.DOTALL)
        return [line.split("  #")[0].strip() for line in text.splitlines() if line.strip()]

    old = set(code(before))
    return sum(line not in old for line in code(after))


# ---- digits ------------------------------------------------------------------------------------------------------------------


@only_long
def test_digits_on_three_ranks_train_as_in_one_process(alone):
    """In steps of all 1437 samples, an order of them changes nothing, and three ranks have 479 each."""
    plain = losses(alone("digits_cnn_before.py", "--epochs", 3, "--batch", 1437))
    ours = losses(on_ranks(3, "digits_cnn.py", "--epochs", 3, "--batch", 1437))
    assert len(plain) == 3
    assert len(set(plain)) == 3, "it learns"
    assert ours == pytest.approx(plain, abs=2e-5)


def test_digits_learn(alone):
    accuracy = re.search(r"test accuracy (\S+), 1 ranks", alone("digits_cnn.py", "--epochs", 6))
    assert accuracy is not None
    assert float(accuracy[1]) > 0.9


# ---- ImageNet ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def photographs(tmp_path_factory) -> Path:
    """ImageNet's layout, with 2 classes of 12 + 2 small JPEGs."""
    root = tmp_path_factory.mktemp("imagenet")
    draw = np.random.RandomState(0)
    for split, count in (("train", 12), ("val", 2)):
        for label in range(2):
            folder = root / split / f"n{label:08d}"
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = draw.randint(0, 128, (40, 48, 3)) + 100 * label
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.jpg")
    return root


@only_long
def test_imagenet_trains_as_in_one_process_and_resumes_on_another_number_of_ranks(alone, photographs, tmp_path):
    # one step of all images per epoch: with few of them a batch norm turns rounding into another training within some steps
    options = ["--data", f"imagefolder:{photographs}", "--model", "resnet18", "--pixels", 32, "--batch", 24]
    plain = alone("imagenet_before.py", *options)
    assert len(losses(plain)) == 2

    assert alone("imagenet.py", *options) == plain, "one rank computes the same bits"

    run = tmp_path / "run"
    two = on_ranks(2, "imagenet.py", *options, "--sync-batchnorm", "--out", run)
    assert losses(two) == pytest.approx(losses(plain), rel=2e-3)

    newest = run / "step-000000002"
    shutil.rmtree(newest)  # as if it had been killed in the second epoch
    resumed = alone("imagenet.py", *options, "--sync-batchnorm", "--out", run)
    assert "epoch  1" not in resumed
    assert losses(resumed) == pytest.approx(losses(two)[1:], rel=2e-3)
    assert newest.is_dir()


def test_the_plain_imagenet_script_resumes_too(alone, tmp_path):
    options = ["--data", "synthetic:3x32x32,classes=2,n=8", "--model", "resnet18"]
    whole = alone("imagenet_before.py", *options, "--out", tmp_path)
    assert len(losses(whole)) == 2
    assert alone("imagenet_before.py", *options, "--out", tmp_path) == ""


# ---- DistributedDataParallel -------------------------------------------------------------------------------------------------


def test_ddp_with_our_hook_trains_as_ddp_does():
    with ThreadPoolExecutor() as both:  # at once: a job that starts leaves a core idle
        plain, ours = both.map(lambda name: losses(on_ranks(2, name, "--epochs", 2)), ["ddp_before.py", "ddp.py"])
    assert len(plain) == 2
    assert plain[1] < plain[0]
    assert ours == pytest.approx(plain, abs=2e-6)


# ---- the others --------------------------------------------------------------------------------------------------------------


def test_the_notebook_runs(alone):
    out = alone("notebook.py")
    assert "torus(2x3)" in out
    assert "raised in the cell: rank 2 has lost its data" in out


@pytest.mark.parametrize(("name", "most"), [("digits_cnn", 10), ("imagenet", 19), ("ddp", 4)])
def test_it_takes_few_lines(name, most):
    assert 0 < changed_lines(f"{name}_before.py", f"{name}.py") <= most


@pytest.mark.parametrize("script", sorted((EXAMPLES / "cluster").glob("*.s*")), ids=lambda path: path.name)
def test_cluster_scripts_are_valid_shell_and_name_files_that_exist(script):
    subprocess.run(["bash", "-n", script], check=True, timeout=10)
    named = re.findall(r"examples/[\w/.]+", script.read_text(encoding="utf-8"))
    assert named
    assert all((ROOT / path).exists() for path in named)


def test_the_trainjob_has_the_fields_of_kubeflow_trainer_v2():
    """Names as in its API, trainer.kubeflow.org/v1alpha1; tests/integrations reads it with Kubeflow's own models."""
    job = yaml.safe_load((EXAMPLES / "cluster" / "trainjob.yaml").read_text(encoding="utf-8"))
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
    assert job["spec"].keys() <= {
        "runtimeRef",
        "initializer",
        "trainer",
        "runtimePatches",
        "suspend",
        "activeDeadlineSeconds",
        "managedBy",
    }
    assert job["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    trainer = job["spec"]["trainer"]
    assert trainer.keys() <= {"image", "command", "args", "env", "numNodes", "resourcesPerNode", "numProcPerNode"}
    assert isinstance(trainer["numNodes"], int)
    assert isinstance(trainer["numProcPerNode"], int)
    assert all(isinstance(each["value"], str) for each in trainer["env"])
    assert trainer["command"][0] == "torchrun"
    assert (ROOT / trainer["command"][1]).exists()
    [patch] = job["spec"]["runtimePatches"]
    assert patch.keys() == {"manager", "trainingRuntimeSpec"}
    [node] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    assert (node["name"], pod["containers"][0]["name"]) == ("node", "node"), "so torch-distributed calls them"
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_the_task_has_the_fields_of_skypilot():
    """Names as in SkyPilot's schema of a task, version 0.14."""
    task = yaml.safe_load((EXAMPLES / "cluster" / "skypilot.yaml").read_text(encoding="utf-8"))
    assert task.keys() <= {
        "name",
        "workdir",
        "num_nodes",
        "resources",
        "envs",
        "secrets",
        "file_mounts",
        "volumes",
        "setup",
        "run",
        "config",
    }
    assert task["resources"].keys() <= {
        "infra",
        "accelerators",
        "cpus",
        "memory",
        "instance_type",
        "use_spot",
        "disk_size",
        "network_tier",
    }
    assert all(
        mount.keys() <= {"name", "source", "store", "mode", "persistent", "config"} for mount in task["file_mounts"].values()
    )
    assert {mount["mode"] for mount in task["file_mounts"].values()} <= {"MOUNT", "COPY", "MOUNT_CACHED"}
    assert isinstance(task["num_nodes"], int)
    assert all(isinstance(value, str) for value in task["envs"].values())
    for script in (task["setup"], task["run"]):
        subprocess.run(["bash", "-n", "-c", script], check=True, timeout=10)
    named = re.findall(r"examples/[\w/.]+", task["run"])
    assert named
    assert all((ROOT / path).exists() for path in named)
    told = ("SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_NUM_GPUS_PER_NODE")
    assert set(re.findall(r"SKYPILOT_\w+", task["run"])) <= set(told)


def test_the_manifest_is_a_pytorchjob_whose_script_exists():
    job = yaml.safe_load((EXAMPLES / "cluster" / "pytorchjob.yaml").read_text(encoding="utf-8"))
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {role: pods["replicas"] for role, pods in replicas.items()} == {"Master": 1, "Worker": 3}
    for pods in replicas.values():
        (container,) = pods["template"]["spec"]["containers"]
        assert container["name"] == "pytorch", "the operator looks for this name"
        assert container["command"][0] == "torchrun"
        assert (ROOT / container["command"][1]).exists()
