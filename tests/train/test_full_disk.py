"""A disk that is full does not end a training: a warning at once, the older checkpoints stay, and a later save works again."""

import subprocess
import sys
from dataclasses import replace

import pytest
from tests.train.runs import TINY, rows
from tests.world.programs.herd import clean_environment

import phalanx
from phalanx.train.checkpoint import CheckpointError, write
from phalanx.train.checkpoint.places import find_places
from phalanx.train.trainer import train

OFTEN = replace(TINY, checkpoint_every_steps=5, keep=10)  # saves after steps 5, 10, 11, 15, 20 and 22


def full_disk(monkeypatch, *, from_: int, to: int) -> None:
    """The disk has no room for saves number `from_` to `to`."""
    saves = iter(range(1, 100))
    write_tensors = write.write_tensors

    def perhaps(path, tensors):
        if from_ <= next(saves) <= to:
            raise OSError(28, "No space left on device", str(path))
        return write_tensors(path, tensors)

    monkeypatch.setattr(write, "write_tensors", perhaps)


def test_training_continues_and_the_next_save_works(tmp_path, monkeypatch, capsys):
    full_disk(monkeypatch, from_=2, to=3)
    results = phalanx.run_local(2, lambda comm: train(OFTEN, comm, out=tmp_path))
    assert [result.steps for result in results] == [22, 22]
    assert sorted(place.step for place in find_places(tmp_path / "checkpoints")) == [5, 15, 20, 22]
    said = capsys.readouterr().out
    assert said.count("no checkpoint: step 10: ") == 1
    assert said.index("no checkpoint: step 10: ") < said.index(" 2/2  ")
    assert "No space left on device" in said


def test_a_run_whose_last_save_fails_fails(tmp_path, monkeypatch):
    full_disk(monkeypatch, from_=4, to=9)
    with pytest.raises(CheckpointError, match=r"step 22: .*(No space left on device|rank 0 gave up the checkpoint)"):
        phalanx.run_local(2, lambda comm: train(OFTEN, comm, out=tmp_path))
    assert sorted(place.step for place in find_places(tmp_path / "checkpoints")) == [5, 10, 11]


@pytest.mark.usefixtures("warm_python")
def test_rows_that_find_no_room_do_not_end_it_either(tmp_path):
    """The kernel refuses every file over 4 kB: checkpoints, and soon the rows."""
    program = (
        "import resource, sys; from phalanx.cli.main import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); sys.exit(main())"
    )
    command = [sys.executable, "-c", program, "train", "--ranks", "1", "--out", str(tmp_path), "--set", "epochs=2"]
    done = subprocess.run(
        [*command, "--set", "model.width=4", "--set", "log_every=1"],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert " 2/2  " in done.stdout
    assert done.stdout.count("rows are missing from") == 1
    assert "no checkpoint: step 23: " in done.stdout
    assert "Traceback" not in done.stderr
    assert "phalanx: rank 0: step 46: " in done.stderr
    assert rows(tmp_path, "interval")
