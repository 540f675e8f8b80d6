"""Worker processes of the loader: the same batches as without them, and a clean end whoever dies."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import pytest
import torch
from tests.data.stand_ins import Files, Nested, Numbers, World, decode, noise

from phalanx.data import BadSample, Loader, Position, SampleError, epoch_order

pytestmark = pytest.mark.usefixtures("warm_python")
DEADLINE = 30.0  # seconds for a process to start or to go


def test_batches_are_those_of_a_thread():
    """Random numbers, memory order, an empty batch and bad samples included; two processes."""
    source = Files(41, bad=tuple(epoch_order(0, 0, 41)[[0, 9]].tolist()))  # rank 0 gets them in its first two batches
    options = {"batch": 8, "decode": decode, "transform": noise, "on_bad": "skip", "last": "keep"}

    def epoch(**who):
        with pytest.warns(UserWarning, match="the file is empty"), Loader(source, World(0, 4), **options, **who) as loader:
            return list(loader), loader.skipped

    expected, skipped = epoch(workers=0)
    got, also_skipped = epoch(workers=2, kind="process")
    assert also_skipped == skipped
    assert len(skipped) == 2
    assert len(got) == 6
    assert [len(x) for x, _ in got][-1] == 0
    for (x, y), (same_x, same_y) in zip(got, expected, strict=True):
        assert torch.equal(x, same_x)
        assert torch.equal(y, same_y)
        assert x.stride() == same_x.stride()
        assert (x.dtype, y.dtype) == (torch.float64, torch.int64)
        x.add_(1)  # what was handed out is the user's, and stays valid


def test_faults_are_told_and_the_loader_goes_on():
    """In one process: nested samples, a bad one, an exception of the user's, death; then another process takes its place."""
    with Loader(Nested(40, bad=7, raises=17, dies=23), batch=5, workers=1, kind="process", shuffle=False) as loader:
        batch = next(iter(loader))
        assert batch["text"] == [f"sample {i}" for i in range(5)]
        assert batch["pair"][0].tolist() == [[i, -i] for i in range(5)]
        assert batch["image"].dtype == torch.bfloat16
        assert batch["image"][:, 1, 2, 2].tolist() == list(range(5))

        with pytest.raises(BadSample, match="sample 7: it is bad"):
            next(iter(loader))
        loader.seek(Position(0, 0, 15))
        with pytest.raises(SampleError, match=r"sample 17: KeyError.*no such key") as caught:
            next(iter(loader))
        assert "stand_ins.py" in str(caught.value.__cause__)  # where it happened
        loader.seek(Position(0, 0, 20))
        with (
            pytest.warns(RuntimeWarning, match="the loader starts another one"),
            pytest.raises(
                SampleError, match="a worker process of the loader was killed by SIGKILL while it was reading sample 23"
            ),
        ):
            next(iter(loader))  # whoever reads this sample is killed
        assert loader.position.samples == 20
        loader.seek(Position(0, 0, 25))
        assert [batch["text"][0] for batch in loader] == ["sample 25", "sample 30", "sample 35"]


def test_a_killed_process_is_replaced_and_no_batch_is_lost_doubled_or_changed():
    source, options = Files(60), {"batch": 5, "decode": decode, "transform": noise}
    with Loader(source, workers=0, **options) as loader:
        expected = list(loader)
    with Loader(source, workers=1, kind="process", **options) as loader:
        batches = iter(loader)
        got = [next(batches)]
        for child in multiprocessing.active_children():
            if child.name == "phalanx loader":
                os.kill(child.pid, signal.SIGKILL)
        with warnings.catch_warnings():  # idle, or at work and then told
            warnings.simplefilter("ignore", RuntimeWarning)
            got += batches
    for (x, y), (same_x, same_y) in zip(got, expected, strict=True):
        assert torch.equal(x, same_x)
        assert torch.equal(y, same_y)


def test_what_cannot_be_sent_is_an_error_with_a_remedy():
    with (
        Loader(
            Numbers(10), batch=5, workers=1, kind="process", multiprocessing_context="spawn", transform=lambda x, draws: x
        ) as loader,
        pytest.raises(TypeError, match=r"cannot be pickled.*multiprocessing_context='fork'"),
    ):
        list(loader)


TRAINER = """
import os, signal
from tests.data.stand_ins import Numbers
from phalanx.data import Loader

loaders = [Loader(Numbers(10_000, slow=0.01), batch=20, workers=2, kind="process") for _ in range(2)]
held = [next(iter(loader)) for loader in loaders]
from multiprocessing import active_children
other = os.fork()  # a process of the user's, which has copies of all pipes and outlives the trainer
if other:
    print(other, *[child.pid for child in active_children()], flush=True)
signal.pause()
"""


def test_nothing_is_left_behind_when_the_trainer_is_killed(tmp_path):
    """Each worker holds ends of its siblings' pipes, so that none of them tells that the trainer is gone."""
    program = tmp_path / "trainer.py"
    program.write_text(textwrap.dedent(TRAINER))
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    with subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True, env=environment) as trainer:
        try:
            other, *workers = trainer.stdout.readline().split()
            mapped = Path(f"/proc/{trainer.pid}/maps").read_text()
            assert "memfd:phalanx loader: batch" in mapped  # the batches it holds are shared memory
            assert "/dev/shm/" not in mapped + Path(f"/proc/{workers[0]}/maps").read_text()
        finally:
            trainer.kill()
        trainer.wait(DEADLINE)
    try:
        assert len(workers) == 4
        assert all(map(is_gone, workers))
        assert not is_zombie(other)
    finally:
        os.kill(int(other), signal.SIGKILL)
    assert not [name for name in os.listdir("/dev/shm") if any(pid in name for pid in (str(trainer.pid), *workers))]


def is_zombie(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def is_gone(pid):
    until = time.monotonic() + DEADLINE
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < until:
        time.sleep(0.05)
    return not os.path.exists(f"/proc/{pid}")
