"""The trainer on simulated GPUs: the bits of a CPU run, a host that waits for the device in no step, and the right times."""

import os
from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.simulated_cuda.launch import launch
from tests.simulated_cuda.simulated import simulated
from tests.simulated_cuda.simulation import process
from tests.train.runs import TINY, InterruptedRunError, Interrupting, play, rows, same

import phalanx
from phalanx.train.checkpoint import RandomState
from phalanx.train.checkpoint.host_copies import HostCopies
from phalanx.train.clock import StepEvents
from phalanx.train.log import Log
from phalanx.train.model import BatchNormConfig, ModelConfig
from phalanx.train.stragglers import INTERVALS
from phalanx.train.trainer import assemble
from phalanx.train.update import OptimizerConfig

SEEDS = range(int(os.environ.get("PHALANX_TEST_SEEDS", "1")))
SMALL = replace(
    TINY, epochs=1, batch=240, log_every=2, data=replace(TINY.data, workers=0), model=ModelConfig(name="mlp", width=8)
)


def on_host(weights):
    return {name: x.cpu() for name, x in weights.items()}


class Counting(Log):
    """A log that remembers how often the host had waited after every step."""

    def step(self, **noted):
        super().step(**noted)
        self.__dict__.setdefault("seen", []).append(len(process().syncs))


def steps_with_waits(comm, config):
    """Train without evaluation or checkpoints; what waited between the first step's end and the last one's."""
    with Counting(config, comm, None, resume=False, show=False) as log:
        trainer = assemble(config, comm, log)
        with trainer.loader, trainer.test:
            trainer.train_epoch(_Never(), lambda: None)
        return [str(sync) for sync in process().syncs[log.seen[0] : log.seen[-1]]]


class _Never:
    def agreed(self):
        return False


CONFIGS = {
    "plain": SMALL,
    "in parts": replace(SMALL, micro_batch=60, label_smoothing=0.1),
    "lars": replace(SMALL, optimizer=OptimizerConfig(name="lars", trust_coefficient=0.02)),
    "rmsprop": replace(SMALL, optimizer=OptimizerConfig(name="rmsprop_warmup")),
    "gossip": replace(SMALL, comm=replace(SMALL.comm, sync="gossip", gossip=phalanx.Gossip(patience=60.0))),
    "shared batch norm": replace(SMALL, model=replace(SMALL.model, batchnorm=BatchNormConfig(statistics="shared"))),
    "double buffering": replace(SMALL, comm=replace(SMALL.comm, double_buffering=True)),
    "16 bits": replace(SMALL, comm=replace(SMALL.comm, wire="float16")),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_no_step_waits_for_the_device(name):
    for seed in SEEDS:
        with simulated(gpus_per_host=2, seed=seed):
            found = launch(2, lambda comm: steps_with_waits(comm, CONFIGS[name]))
        assert found == [[], []]


def test_a_scaler_waits_once_per_step():
    """torch's own: its GradScaler asks whether to skip the update. Nothing of ours waits besides."""
    config = replace(SMALL, batch=480, model=replace(SMALL.model, precision="float16"))
    with simulated(gpus_per_host=2, seed=0):
        found = launch(2, lambda comm: steps_with_waits(comm, config))
    steps = 1437 // config.batch - 1  # after the first one
    for waits in found:
        assert [wait.split()[0] for wait in waits] == ["item"] * steps


def result_and_weights(comm, config, out):
    result, weights = play(comm, config, out)
    return result, on_host(weights)


@pytest.mark.parametrize("name", ["plain", "in parts", "gossip"])
def test_a_gpu_trains_and_counts_as_a_cpu(name, tmp_path):
    config = CONFIGS[name]
    wanted = phalanx.run_local(2, lambda comm: play(comm, config, tmp_path / "cpu"))
    for seed in SEEDS:
        with simulated(gpus_per_host=2, seed=seed):
            found = launch(2, partial(result_and_weights, config=config, out=tmp_path / f"gpu{seed}"))
        for (result, weights), (expected, theirs) in zip(found, wanted, strict=True):
            assert replace(result, seconds=0.0) == replace(expected, seconds=0.0)
            assert same(weights, theirs)
        for mine, theirs in zip(*(rows(tmp_path / where, "interval") for where in (f"gpu{seed}", "cpu")), strict=True):
            same_fields = ("step", "epoch", "rate", "batch", "loss", "accuracy")  # late, but of the right interval
            assert [mine[field] for field in same_fields] == [theirs[field] for field in same_fields]


def test_a_resumed_run_on_gpus_is_the_same_run(tmp_path):
    config = replace(SMALL, checkpoint_every_steps=2, comm=CONFIGS["gossip"].comm)
    run = lambda comm, where, **options: on_host(play(comm, config, tmp_path / where, **options)[1])  # noqa: E731
    with simulated(gpus_per_host=2, seed=0):
        wanted = launch(2, lambda comm: run(comm, "whole"))
    with simulated(gpus_per_host=2, seed=1), pytest.raises(InterruptedRunError):
        launch(2, lambda comm: run(comm, "parts", interrupt=3))
    with simulated(gpus_per_host=2, seed=2):
        found = launch(2, lambda comm: run(comm, "parts", resume=True))
    assert all(same(a, b) for a, b in zip(found, wanted, strict=True))
    assert Interrupting.at == 0


def test_the_generator_of_the_gpu_is_saved_and_restored():
    """That of the current one, whose index is not always 0."""
    with simulated(gpus_per_host=2, seed=0):
        torch.cuda.set_device(1)
        torch.rand(3, device="cuda")
        saved = RandomState().state_dict()
        drawn = torch.rand(3, device="cuda:1").tolist()
        assert torch.rand(3, device="cuda:1").tolist() != drawn
        RandomState().load_state_dict(saved)
        assert torch.rand(3, device="cuda:1").tolist() == drawn


def test_a_checkpoint_waits_for_its_own_stream_only():
    """Another one may wait for a rank that is not there yet."""
    with simulated(gpus_per_host=1, seed=0):
        x, other = torch.ones(3).to("cuda") * 2, torch.cuda.Stream()
        with torch.cuda.stream(other):
            torch.cuda._sleep(int(1e9))
        before = len(process().syncs)
        copies = HostCopies().take({"x": x})
        assert copies["x"].tolist() == [2.0, 2.0, 2.0]
        assert [sync.what for sync in process().syncs[before:]] == ["Stream.synchronize"]


# ---- times -------------------------------------------------------------------------------------------------------------------


def test_events_tell_computing_from_waiting_for_others():
    """Times of the device, whatever the host does meanwhile; before the device is there, none."""
    with simulated(gpus_per_host=1, seed=3):
        device, other = torch.device("cuda", 0), torch.cuda.Stream()
        before = None
        for _ in range(2):
            events = StepEvents(device, 5.0, before)
            before = events
            w = torch.ones(2).to(device).requires_grad_()
            torch.cuda._sleep(int(2e9))
            loss = (w * 3).sum()
            events.watch(loss)
            with torch.cuda.stream(other):
                torch.cuda._sleep(int(9e9))  # the others' gradients come 7 s later
            w.register_hook(lambda _: None)
            loss.backward()
            torch.cuda.current_stream().wait_stream(other)
            events.arrived()
            torch.cuda._sleep(int(1e9))
            events.ended()
        torch.cuda.synchronize()
        times = events.read()
    assert times.compute >= 2.0
    assert times.update >= 1.0
    assert times.input < 0.1  # the device had work all the time, although the host says that it waited 5 s for input


def slow(trainer, seconds):
    """A GPU that takes longer for its forward pass."""
    forward = trainer.forward

    def slowly(x):
        torch.cuda._sleep(int(seconds * 1e9))
        return forward(x)

    trainer.forward = slowly


def test_a_slow_gpu_is_named(tmp_path):
    """By the host's clock all ranks were equally slow, or none."""
    config = replace(SMALL, epochs=INTERVALS + 1, log_every=1)

    def run(comm):
        with Log(config, comm, tmp_path, resume=False, show=False) as log:
            trainer = assemble(config, comm, log)
            slow(trainer, 2.0 if comm.rank == 1 else 0.1)
            with trainer.loader, trainer.test:
                trainer.run(None, resume=False)

    with simulated(gpus_per_host=2, seed=0):
        launch(2, run)
    told = rows(tmp_path, "straggler")
    assert [(row["rank"], row["cause"]) for row in told] == [(1, "compute")]
