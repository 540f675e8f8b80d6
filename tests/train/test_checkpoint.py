"""Saving and loading by one rank and by ranks as threads: what resumes, what is kept, what is refused, and what errors say."""

import os
import resource
import shutil
import threading
import time

import pytest
import torch
from safetensors.torch import load_file
from tests.train.conftest import Training, same

import phalanx
from phalanx import Checkpointer
from phalanx.train.checkpoint import CheckpointError, RandomState
from phalanx.train.checkpoint.files import write_bytes


def names(directory):
    """All but the lock, which is there while a Checkpointer that saves is open."""
    return sorted(set(os.listdir(directory)) - {".lock"})


def save_steps(directory, comm, steps, **options):
    """A tensor that holds its step."""
    with Checkpointer(directory, comm, **options) as checkpoints:
        for step in steps:
            checkpoints.save(step, x=torch.full((3,), float(step)))


def load_step(directory, comm):
    x = torch.empty(3)
    with Checkpointer(directory, comm) as checkpoints:
        step = checkpoints.load(x=x)
    assert step is None or x.tolist() == [step] * 3
    return step


# ---- resume -----------------------------------------------------------------------------------------------------------------


def test_resumed_training_continues_bit_for_bit(directory, comm):
    whole = Training()
    with Checkpointer(directory, comm) as checkpoints:
        for step in range(1, 9):
            whole.step()
            if step == 4:
                checkpoints.save(step, **whole.state)  # and training goes on while it is written
    half = Training()
    half.step()  # whatever it has done before is undone
    with Checkpointer(directory, comm) as checkpoints:
        assert checkpoints.load(**half.state) == 4
    for _ in range(4):
        half.step()
    assert same(half.everything(), whole.everything())
    half.step()
    assert not same(half.everything(), whole.everything())  # the judge can say no


def test_double_buffering_goes_on_with_the_mean_that_was_under_way(directory):
    def train(comm, steps, act):
        """The weights after some steps; `act(checkpoints, step, state)` is called before each of them."""
        model = torch.nn.Linear(6, 3)
        with torch.no_grad():
            model.weight.copy_(torch.linspace(-1, 1, 18).view(3, 6))
            model.bias.zero_()
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        opt = phalanx.create_multi_node_optimizer(opt, comm, double_buffering=True)
        state = {"model": model, "optimizer": opt, "communication": opt.communication}
        with Checkpointer(directory, comm) as checkpoints:
            for step in steps:
                act(checkpoints, step, state)
                opt.zero_grad()
                model(torch.arange(12.0).view(2, 6).add(step + comm.rank).sin()).square().sum().backward()
                opt.step()
        return model.weight.detach().clone()

    def save(checkpoints, step, state):
        if step == 4:
            checkpoints.save(step, **state)

    def load(checkpoints, step, state):
        if step == 4:
            assert checkpoints.load(**state) == 4

    def load_without_communication(checkpoints, step, state):
        load(checkpoints, step, {"model": state["model"], "optimizer": state["optimizer"]})

    undisturbed = phalanx.run_local(2, lambda comm: train(comm, range(8), lambda *_: None))
    for own in (
        phalanx.run_local(2, lambda comm: train(comm, range(8), save)),  # to save changes nothing
        phalanx.run_local(2, lambda comm: train(comm, range(4, 8), load)),
    ):
        assert all(torch.equal(x, undisturbed[0]) for x in own)
    other = phalanx.run_local(2, lambda comm: train(comm, range(4, 8), load_without_communication))
    assert not torch.equal(other[0], undisturbed[0])  # the first of its steps had nothing to apply


def test_tied_weights_are_stored_once_and_stay_tied(directory, comm):
    training = Training()
    with Checkpointer(directory, comm) as checkpoints:
        checkpoints.save(0, **training.state)
        checkpoints.load(**training.state)
    assert training.model[3].weight is training.model[0].weight
    stored = load_file(directory / "step-000000000" / "rank-00000.safetensors")  # others read it, too
    assert "model/0.weight" in stored
    assert "model/3.weight" not in stored


def test_the_state_is_that_of_the_moment_of_the_save(directory, comm):
    x, progress = torch.zeros(1 << 20), {"n": 0}
    with Checkpointer(directory, comm) as checkpoints:
        for step in range(3):
            checkpoints.save(step, x=x, progress=progress)
            x += 1
            progress["n"] += 1
    with Checkpointer(directory, comm) as checkpoints:
        assert checkpoints.load(x=x, progress=progress) == 2
    assert x.unique().tolist() == [2]
    assert progress == {"n": 2}


def test_nothing_to_load(directory, comm):
    assert load_step(directory, comm) is None


def test_part_of_the_state_may_be_loaded(directory, comm):
    training = Training()
    with Checkpointer(directory, comm) as checkpoints:
        checkpoints.save(7, **training.state)
    other = Training()
    other.step()
    with Checkpointer(directory, comm) as checkpoints:
        assert checkpoints.load(model=other.model) == 7
    assert same(dict(other.model.state_dict()), dict(training.model.state_dict()))
    assert other.progress["step"] == 1


# ---- which are kept ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept(directory, comm, keep):
    save_steps(directory, comm, [1, 5, 20, 100], keep=keep)
    assert names(directory) == [f"step-{step:09}" for step in [1, 5, 20, 100]][-keep:]
    assert load_step(directory, comm) == 100


def test_a_step_may_be_saved_twice_and_nothing_is_overwritten(directory, comm):
    save_steps(directory, comm, [3, 3, 3])
    assert names(directory) == ["step-000000003", "step-000000003.2", "step-000000003.3"]
    assert load_step(directory, comm) == 3


def test_leftovers_go_at_the_first_save_and_readers_delete_nothing(directory, comm):
    save_steps(directory, comm, [1])
    left = directory / "step-000000002.tmp-00ff00ff"
    left.mkdir()
    (left / "rank-00000.safetensors").write_bytes(b"half")
    foreign = directory / "notes.txt"
    foreign.touch()
    assert load_step(directory, comm) == 1
    assert left.exists()
    x = torch.empty(3)
    with Checkpointer(directory, comm) as checkpoints:
        checkpoints.load(x=x)
        checkpoints.save(2, x=x)
    assert names(directory) == ["notes.txt", "step-000000001", "step-000000002"]


def test_a_directory_of_an_earlier_run_is_not_mixed_with_a_new_one(directory, comm):
    save_steps(directory, comm, [10, 20])
    with pytest.raises(CheckpointError, match="earlier run, up to step 20: load"):
        save_steps(directory, comm, [1])
    assert names(directory) == ["step-000000010", "step-000000020"]


def test_damaged_ones_do_not_push_out_intact_ones(directory, comm):
    save_steps(directory, comm, [10, 20, 30])
    (directory / "step-000000030" / "manifest.json").unlink()
    x = torch.empty(3)
    with Checkpointer(directory, comm, keep=2) as checkpoints:
        with pytest.warns(RuntimeWarning, match=r"step-000000030.manifest\.json: No such file"):
            assert checkpoints.load(x=x) == 20
        checkpoints.save(25, x=torch.full((3,), 25.0))
        checkpoints.wait()
        assert names(directory) == ["step-000000020", "step-000000025", "step-000000030"]
        checkpoints.save(35, x=torch.full((3,), 35.0))
    assert names(directory) == ["step-000000025", "step-000000035"]


def test_all_damaged_is_an_error_and_not_a_new_start(directory, comm):
    save_steps(directory, comm, [10, 20])
    for name in names(directory):
        (directory / name / "rank-00000.json").write_text("{}")
    with pytest.warns(RuntimeWarning), pytest.raises(CheckpointError, match=r"every checkpoint .*is damaged:(?s:.*)has 2 bytes"):
        load_step(directory, comm)


# ---- what is refused --------------------------------------------------------------------------------------------------------


def linear(*sizes, **options):
    return torch.nn.Linear(*sizes, **options)


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda m: {"model": linear(3, 2, bias=False)}, ["model.bias: only in the checkpoint"]),
        (lambda m: {"model": torch.nn.Sequential(m)}, ["model.0.weight: only here", "model.weight: only in the checkpoint"]),
        (lambda m: {"model": linear(4, 2)}, ["model.weight: float32[2, 3] in the checkpoint, float32[2, 4] here"]),
        (lambda m: {"model": linear(3, 2).double()}, ["model.bias: float32[2] in the checkpoint, float64[2] here"]),
        (lambda m: {"model": m, "ema": torch.zeros(2)}, ["ema: only here"]),
        (lambda m: {"x": torch.zeros(5)}, ["x: float32[4] in the checkpoint, float32[5] here"]),
        (lambda m: {"x": {}}, ["x: a tensor in the checkpoint, plain data here"]),
        (lambda m: {"optimizer": m}, ["optimizer: an optimizer in the checkpoint, a module here"]),
        (lambda m: {"optimizer": torch.optim.Adam(m.parameters())}, ["optimizer.param_groups[0]['betas']: only here"]),
        (lambda m: {"optimizer": sgd(linear(2, 3))}, ["optimizer: parameter 0 has shape (2, 3) in the checkpoint, (3, 2) here"]),
        (
            lambda m: {"optimizer": torch.optim.SGD([{"params": [p]} for p in m.parameters()])},
            ["optimizer.param_groups: [2] parameters in the checkpoint, [1, 1] here"],
        ),
    ],
)  # fmt: skip
def test_a_checkpoint_of_something_else(directory, comm, change, told):
    model, x = linear(3, 2), torch.ones(4)
    with Checkpointer(directory, comm) as checkpoints:
        checkpoints.save(1, model=model, optimizer=sgd(model), x=x)
        live = torch.zeros(4)
        with pytest.raises(CheckpointError, match="something else") as caught:
            checkpoints.load(**{"x": live} | change(linear(3, 2)))
    for text in told:
        assert text in str(caught.value)
    assert live.tolist() == [0] * 4  # nothing was changed


def test_another_config_is_refused_with_the_differences(directory, comm):
    config = {"model": {"depth": 20, "width": 1}, "lr": [0.1, 0.2], "seed": 0}
    other = {"model": {"depth": 32}, "lr": [0.1, 0.3], "seed": 0, "note": None}
    x = torch.zeros(1)
    with Checkpointer(directory, comm, config=config) as checkpoints:
        checkpoints.save(1, x=x)
    with Checkpointer(directory, comm, config=config) as checkpoints:
        assert checkpoints.load(x=x) == 1
    with Checkpointer(directory, comm, config=other) as checkpoints, pytest.raises(CheckpointError) as caught:
        checkpoints.load(x=x)
    for text in ["config.model.depth: 20 in the checkpoint, 32 here", "config.model.width: only in the checkpoint"]:
        assert text in str(caught.value)
    for text in ["config.lr[1]: 0.2 in the checkpoint, 0.3 here", "config.note: only here"]:
        assert text in str(caught.value)
    assert "seed" not in str(caught.value)


class Moody:
    """Loads nothing when it is in the mood."""

    def __init__(self, refuses=False):
        self.refuses = refuses

    def state_dict(self):
        return {"a": 1}

    def load_state_dict(self, state):
        if self.refuses:
            raise KeyError("not today")


def test_a_load_that_fails_half_way_is_undone_on_all_ranks(directory):
    def play(comm):
        model = linear(3, 2)
        optimizer, moody = sgd(model, momentum=0.9), Moody()
        state = {"model": model, "optimizer": optimizer, "x": torch.ones(2), "d": {"a": 1}, "moody": moody}
        with Checkpointer(directory, comm) as checkpoints:
            checkpoints.save(1, **state)
            with torch.no_grad():
                model.weight.zero_()
            state["x"].zero_()
            state["d"]["a"] = 2
            moody.refuses = comm.rank == 1
            with pytest.raises(KeyError if comm.rank == 1 else CheckpointError, match="not today"):
                checkpoints.load(**state)
            assert model.weight.eq(0).all()
            assert (state["x"].tolist(), state["d"]) == ([0, 0], {"a": 2})
            moody.refuses = False
            assert checkpoints.load(**state) == 1
            assert model.weight.ne(0).all()
            assert (state["x"].tolist(), state["d"]) == ([1, 1], {"a": 1})

    phalanx.run_local(2, play)


@pytest.mark.parametrize("wrong", [3, "text", None, (1, 2), {1, 2}, torch.float32])
def test_what_could_not_be_filled_in_place_is_refused_at_once(directory, comm, wrong):
    with Checkpointer(directory, comm) as checkpoints:
        with pytest.raises(TypeError, match="Put a plain value into a dict"):
            checkpoints.save(1, x=torch.ones(1), thing=wrong)
        with pytest.raises(TypeError, match="Put a plain value into a dict"):
            checkpoints.load(x=torch.ones(1), thing=wrong)
    assert names(directory) == []


def test_wrong_arguments(directory, comm):
    x = torch.ones(1)
    with pytest.raises(ValueError, match="keep=0"):
        Checkpointer(directory, comm, keep=0)
    with pytest.raises(TypeError, match="comm"):
        Checkpointer(directory, None)
    with pytest.raises(TypeError, match="config/a is a tensor"):
        Checkpointer(directory, comm, config={"a": x})
    with Checkpointer(directory, comm) as checkpoints:
        checkpoints.save(5, x=x)
        for step in (-1, 1.5, True, "1"):
            with pytest.raises(ValueError, match="step="):
                checkpoints.save(step, x=x)
        with pytest.raises(ValueError, match="steps go up"):
            checkpoints.save(4, x=x)
        with pytest.raises(ValueError, match="nothing to save"):
            checkpoints.save(6)
        with pytest.raises(TypeError, match=r"d: a is a builtins\.set"):
            checkpoints.save(6, d={"a": set()})
    checkpoints.close()
    with pytest.raises(RuntimeError, match="closed"):
        checkpoints.save(6, x=x)
    assert names(directory) == ["step-000000005"]


# ---- disks that fail ----------------------------------------------------------------------------------------------------------


def test_a_full_disk_surfaces_at_the_next_save_and_the_old_one_stays(directory, comm):
    """A limit on the size of files: the write fails in the middle, as on a full disk."""
    large, small = torch.zeros(1 << 20), torch.zeros(8)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpointer(directory, comm) as checkpoints:
        checkpoints.save(1, x=small)
        checkpoints.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
        try:
            checkpoints.save(2, x=large)
            with pytest.raises(CheckpointError, match=r"step 2: .*File too large"):
                checkpoints.save(3, x=large)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert names(directory) == ["step-000000001"]  # no half of step 2 either
        checkpoints.save(3, x=large)
    assert names(directory) == ["step-000000001", "step-000000003"]


def test_an_error_of_the_last_save_surfaces_at_close(directory, comm):
    checkpoints = Checkpointer(directory, comm)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        checkpoints.save(2, x=torch.zeros(1 << 20))
        with pytest.raises(CheckpointError, match="File too large"):
            checkpoints.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    checkpoints.close()


def test_a_directory_that_disappears(directory, comm):
    with Checkpointer(directory, comm) as checkpoints:
        checkpoints.save(1, x=torch.zeros(3))
        checkpoints.wait()
        shutil.rmtree(directory)
        with pytest.raises(CheckpointError, match="has disappeared"):
            checkpoints.save(2, x=torch.zeros(3))
    assert not directory.exists()  # it may have been a disk that is no longer mounted: nothing is made in its place


def test_a_directory_that_cannot_be_made(tmp_path, comm):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot write in .*file/here: "):
        Checkpointer(tmp_path / "file" / "here", comm)


# ---- ranks ------------------------------------------------------------------------------------------------------------------


def parts(directory, step):
    return [name for name in names(directory / f"step-{step:09}") if name.endswith("safetensors")]


def test_equal_ranks_have_one_writer_and_deviations_are_small(directory):
    shared, own = torch.randn(1000), 5

    def play(comm):
        with Checkpointer(directory, comm) as checkpoints:
            checkpoints.save(1, model={"w": shared.clone()}, loader={"at": 3})
            checkpoints.save(
                2, model={"w": shared.clone(), "mean": torch.full((own,), float(comm.rank))}, loader={"at": comm.rank}
            )

    phalanx.run_local(4, play)
    assert parts(directory, 1) == ["rank-00000.safetensors"]
    folder = directory / "step-000000002"
    assert parts(directory, 2) == [f"rank-{rank:05}.safetensors" for rank in range(4)]
    for rank in range(1, 4):
        stored = load_file(folder / f"rank-{rank:05}.safetensors")
        assert {name: x.tolist() for name, x in stored.items()} == {"model/mean": [rank] * own}


def test_replicas_in_pairs_are_written_once_per_pair(directory):
    def play(comm):
        x = torch.full((9,), float(comm.rank // 2))
        with Checkpointer(directory, comm) as checkpoints:
            checkpoints.save(1, x=x)
            assert checkpoints.load(x=x) == 1
        return x.unique().tolist()

    assert phalanx.run_local(4, play) == [[0], [0], [1], [1]]
    assert parts(directory, 1) == ["rank-00000.safetensors", "rank-00002.safetensors"]


@pytest.mark.parametrize(("old", "new"), [(1, 3), (2, 5), (3, 3), (4, 3), (5, 1)])
def test_another_world_size(directory, old, new):
    def save(comm):
        with Checkpointer(directory, comm) as checkpoints:
            checkpoints.save(1, equal=torch.arange(3.0), own=torch.tensor([comm.rank]), data={"rank": comm.rank})

    def load(comm):
        equal, own, data = torch.zeros(3), torch.tensor([-1]), {}
        with Checkpointer(directory, comm) as checkpoints:
            assert checkpoints.load(equal=equal, own=own, data=data) == 1
        return equal.tolist(), own.item(), data["rank"]

    phalanx.run_local(old, save)
    assert phalanx.run_local(new, load) == [([0, 1, 2], rank % old, rank % old) for rank in range(new)]


def test_random_streams_of_another_world_size_are_distinct_and_reproducible():
    state = RandomState().state_dict()
    derived = [RandomState.resized(state, rank, 3)["torch"] for rank in range(3)]
    assert len({bytes(own.tolist()) for own in derived}) == 3
    assert torch.equal(derived[1], RandomState.resized(state, 1, 3)["torch"])
    before = RandomState().state_dict()
    RandomState().load_state_dict(RandomState.resized(state, 1, 3))  # all of it is a state
    RandomState().load_state_dict(before)


def test_damage_that_one_rank_sees_makes_all_fall_back(directory):
    def save(comm):
        with Checkpointer(directory, comm) as checkpoints:
            for step in (1, 2):
                checkpoints.save(step, x=torch.tensor([step, comm.rank]))

    def load(comm):
        x = torch.zeros(2, dtype=torch.int64)
        with Checkpointer(directory, comm) as checkpoints:
            return checkpoints.load(x=x), x.tolist()

    phalanx.run_local(3, save)
    path = directory / "step-000000002" / "rank-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.warns(RuntimeWarning, match=r"rank-00002\.safetensors: its SHA-256 .*\(seen by rank 2\)") as told:
        assert phalanx.run_local(3, load) == [(1, [1, rank]) for rank in range(3)]
    assert len(told) == 1
    with pytest.warns(RuntimeWarning, match="rank-00002"):  # also where its owner is not there any more
        assert phalanx.run_local(1, load) == [(1, [1, 0])]


def test_ranks_that_disagree_are_told(directory):
    def play(comm):
        with Checkpointer(directory, comm) as checkpoints:
            with pytest.raises(CheckpointError, match="ranks save different things: rank 0"):
                checkpoints.save(comm.rank, x=torch.ones(1))
            with pytest.raises(TypeError if comm.rank else CheckpointError, match=r"thing is a builtins\.int"):
                checkpoints.save(1, thing=1 if comm.rank else {})
            checkpoints.save(1, x=torch.ones(1))

    phalanx.run_local(2, play)
    assert names(directory) == ["step-000000001"]


def test_directories_that_are_not_shared_are_found_out_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("phalanx.train.checkpoint.places.SEEN_WITHIN", 0.1)

    def play(comm):
        with pytest.raises(CheckpointError, match=r"rank\(s\) 1, 2 do not see what rank 0 writes"):
            Checkpointer(tmp_path / str(comm.rank), comm)

    phalanx.run_local(3, play)
    assert names(tmp_path / "0") == []


# ---- the background ---------------------------------------------------------------------------------------------------------


def test_the_pause_is_the_copy_and_no_thread_is_left(directory, comm):
    x = torch.zeros(8 << 20)  # 32 MiB: to hash it alone takes longer than to copy it
    pauses, whole = [], []
    with Checkpointer(directory, comm, keep=1) as checkpoints:
        for step in range(3):
            begun = time.perf_counter()
            checkpoints.save(step, x=x)
            pauses.append(time.perf_counter() - begun)
            checkpoints.wait()
            whole.append(time.perf_counter() - begun)
    assert min(pauses) < 0.8 * min(whole)
    assert not any(thread.name == "phalanx-checkpoint" for thread in threading.enumerate())


def test_an_exception_in_the_with_is_not_held_up_and_not_replaced(directory, comm):
    def fail():
        with Checkpointer(directory, comm) as checkpoints:
            checkpoints.save(1, x=torch.ones(3))
            return 1 / 0

    with pytest.raises(ZeroDivisionError):
        fail()


def test_a_part_is_safe_when_rank_0_completes_the_checkpoint_the_moment_it_appears(tmp_path, monkeypatch):
    """Rank 0 renames the directory as soon as it sees the last part, whose writer has yet to make its name durable."""
    staging, done, rename = tmp_path / "staging", tmp_path / "done", os.rename
    staging.mkdir()

    def renamed_at_once(old, new):
        rename(old, new)
        rename(staging, done)

    monkeypatch.setattr(os, "rename", renamed_at_once)
    write_bytes(staging / "part", b"whole")
    assert names(done) == ["part"]
    assert (done / "part").read_bytes() == b"whole"
