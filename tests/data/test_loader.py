"""The loader: exact epochs on any number of ranks, resumed anywhere, made by anybody; and what it does when things go wrong."""

import gc
import itertools
import json
import re
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.data.stand_ins import Counted, Files, Nested, Numbers, World, decode, noise
from tests.warm.popen import Python, warm

import phalanx
from phalanx.data import Arrays, BadSample, BatchPlan, Loader, Position, SampleError, Stage, epoch_order, scatter_dataset

ARRAYS = Arrays(torch.arange(100, dtype=torch.uint8).reshape(100, 1, 1, 1).expand(100, 3, 2, 2).contiguous(), torch.arange(100))
COLUMNS = (torch.arange(100).float().unsqueeze(1), torch.arange(100))


def loaders(source, size, **options):
    return [Loader(source, World(rank, size), **options) for rank in range(size)]


def labels(batches):
    return [int(i) for _, y in batches for i in y]


# ---- exactly once


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("source", [ARRAYS, COLUMNS, Numbers(100)], ids=["arrays", "tensors", "map-style"])
def test_an_epoch_over_all_ranks(source, size):
    batch = {5: 15, 8: 24}.get(size, 12)  # none divides 100
    order = epoch_order(5, 0, 100).tolist()
    for last in ("keep", "drop", "pad"):
        ranks = loaders(source, size, batch=batch, last=last, workers=0, seed=5)
        counts = [len(loader) for loader in ranks]
        done = [list(loader) for loader in ranks]
        assert [len(batches) for batches in done] == counts
        assert len(set(counts)) == 1
        until = {"keep": 100, "drop": 100 // batch * batch, "pad": -(-100 // batch) * batch}[last]
        expected = Counter((order * 2)[:until])
        assert Counter(i for batches in done for i in labels(batches)) == expected
        assert {loader.position for loader in ranks} == {Position(5, 1, 0)}


def test_the_epoch_advances_by_itself():
    loader = Loader(Numbers(50), batch=10, workers=0)
    first, second = labels(loader), labels(loader)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first == epoch_order(0, 0, 50).tolist()
    assert second == epoch_order(0, 1, 50).tolist()
    assert labels(Loader(Numbers(50), batch=10, shuffle=False, workers=0)) == list(range(50))


def test_defaults_of_last():
    assert [len(labels(Loader(Numbers(25), batch=10, shuffle=shuffle))) for shuffle in (True, False)] == [20, 25]


@pytest.mark.parametrize("source", [ARRAYS, Numbers(100), Files(100)], ids=["arrays", "map-style", "encoded"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_cut_the_batch_of_one_process(source, size):
    """Side by side the parts of the ranks are the batch of a rank alone, random transforms included."""
    options = {"batch": 20, "seed": 3, "transform": noise, "decode": decode if isinstance(source, Files) else None}
    alone = list(Loader(source, workers=0, **options))
    ranks = [list(loader) for loader in loaders(source, size, **options)]
    assert len(alone) == 5
    for whole, *parts in zip(alone, *ranks, strict=True):
        for field in (0, 1):
            assert torch.equal(whole[field], torch.cat([part[field] for part in parts]))


def test_workers_change_nothing():
    def epoch(**options):
        with Loader(Files(60), World(1, 2), batch=12, decode=decode, transform=noise, **options) as loader:
            return [[x.tolist(), y.tolist()] for x, y in itertools.chain(loader, loader)]

    expected = epoch(workers=0)
    assert len(expected) == 10
    for options in ({"workers": 1}, {"workers": 3, "prefetch": 1}, {"workers": 2, "prefetch": 5}, {}):
        assert epoch(**options) == expected


def test_micro_batches_and_steps():
    plan = BatchPlan([Stage(epochs=1, batch=24), Stage(epochs=2, batch=48)])
    ranks = loaders(Numbers(100), 3, batch=plan, micro_batch=4, last="keep", seed=2, shuffle=False)
    for epoch, (batch, sizes) in enumerate([(24, [24] * 4 + [4]), (48, [48, 48, 4]), (48, [48, 48, 4]), (48, [48, 48, 4])]):
        assert [loader.steps_per_epoch(epoch) for loader in ranks] == [len(sizes)] * 3
        done = [list(loader.steps()) for loader in ranks]
        assert [[(s.epoch, s.index, s.batch) for s in steps] for steps in done] == [
            [(epoch, i, b) for i, b in enumerate(sizes)]
        ] * 3
        for together in zip(*done):
            assert sum(step.samples for step in together) == together[0].batch
            assert len({len(step.micro) for step in together}) == 1
            if together[0].batch == batch:
                assert all(x.shape == (4, 1) for step in together for x, _ in step.micro)
        assert sorted(i for steps in done for step in steps for i in labels(step.micro)) == list(range(100))


@pytest.mark.parametrize("source", [ARRAYS.take(np.arange(5)), Files(5), Numbers(5)], ids=["tensors", "encoded", "map-style"])
def test_a_rank_may_get_an_empty_batch_of_the_right_shape(source):
    options = {"decode": decode} if isinstance(source, Files) else {}
    ranks = [list(loader) for loader in loaders(source, 8, batch=8, shuffle=False, **options)]
    shapes = {(tuple(x.shape[1:]), x.dtype, y.dtype) for batches in ranks for x, y in batches}
    assert [len(batches) for batches in ranks] == [1] * 8
    assert sorted(len(x) for batches in ranks for x, _ in batches) == [0, 0, 0, 1, 1, 1, 1, 1]
    assert len(shapes) == 1


# ---- resume


@pytest.mark.parametrize("others", [1, 3, 5, 6])
@pytest.mark.parametrize("steps", [1, 4])
def test_saved_on_four_ranks_resumed_on_others(others, steps):
    ranks = loaders(Numbers(1000), 4, batch=60, last="keep", seed=9)
    next(iter(ranks[0].steps()))  # an epoch before, to be in the middle of something
    for loader in ranks:
        loader.seek(Position(9, 2))
    before = [step for loader in ranks for step in itertools.islice(loader.steps(), steps)]
    states = [json.loads(json.dumps(loader.state_dict())) for loader in ranks]
    assert states == [{"seed": 9, "epoch": 2, "samples": 60 * steps, "n": 1000, "shuffle": True}] * 4
    resumed = loaders(Numbers(1000), others, batch=30, last="keep")
    for loader in resumed:
        loader.load_state_dict(states[0])
    after = [list(loader.steps()) for loader in resumed]
    assert {len(done) for done in after} == {-(-(1000 - 60 * steps) // 30)}
    seen = Counter(i for step in (*before, *itertools.chain(*after)) for i in labels(step.micro))
    assert seen == Counter(range(1000))


@pytest.mark.parametrize("accumulate", [2, 4])
def test_the_length_is_that_of_the_epoch_from_its_first_batch_to_its_last(accumulate):
    """Scripts compare with it to find the last batch of an accumulation."""
    plan = BatchPlan([Stage(epochs=1, batch=10), Stage(epochs=1, batch=20)])
    loader = Loader(Numbers(90), batch=plan, last="keep")
    for wanted in (9, 5, 5):
        assert len(loader) == wanted
        updates = 0
        for i, _ in enumerate(loader):
            assert len(loader) == wanted
            updates += (i + 1) % accumulate == 0 or i + 1 == len(loader)
        assert updates == -(-wanted // accumulate)


def test_the_length_after_a_break_and_a_resume_is_that_of_the_whole_epoch():
    loader = Loader(Numbers(60), batch=10)
    for i, _ in enumerate(loader):
        if i == 2:
            break
    assert len(loader) == 6
    resumed = Loader(Numbers(60), batch=10)
    resumed.load_state_dict(loader.state_dict())
    assert len(resumed) == 6
    assert len(list(resumed)) == 3
    resumed.seek(Position(0, 5))
    assert len(resumed) == 6


def test_what_is_prefetched_does_not_count():
    with Loader(Counted(100), batch=10, workers=1, prefetch=4) as loader:
        assert loader.position == Position(0, 0, 0)
        for i, _ in enumerate(loader):
            if i < 9:
                assert loader.position == Position(0, 0, 10 * (i + 1))
    assert loader.position == Position(0, 1, 0)


def test_a_step_counts_when_all_its_micro_batches_have_come():
    loader = Loader(Numbers(20), batch=10, micro_batch=5, shuffle=False)
    batches = iter(loader)
    next(batches)
    assert loader.position == Position(0, 0, 0)
    next(batches)
    assert loader.position == Position(0, 0, 10)
    next(batches)
    assert labels(loader) == list(range(10, 20))  # a new iteration repeats the step that was not completed


def test_a_broken_off_epoch_goes_on_where_it_was():
    with Loader(Numbers(60), batch=10, workers=2) as loader:
        first = labels(itertools.islice(loader, 2))
        assert first + labels(loader) == epoch_order(0, 0, 60).tolist()
        next(iter(loader))
        loader.rewind()
        assert labels(loader) == epoch_order(0, 1, 60).tolist()


def test_one_iteration_at_a_time():
    loader = Loader(Numbers(60), batch=10)
    first = iter(loader)
    next(first)
    assert len(labels(loader)) == 50
    with pytest.raises(RuntimeError, match="iteration is over"):
        next(first)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 99}, "n=99, this loader has n=100"),
        ({"shuffle": False}, "shuffle=False"),
        ({"samples": 101}, "100 samples"),
        ({"epoch": -1}, "epoch must be 0 or more"),
    ],
)
def test_a_state_of_something_else(change, message):
    loader = Loader(Numbers(100), batch=10)
    with pytest.raises(ValueError, match=message):
        loader.load_state_dict(loader.state_dict() | change)
    with pytest.raises(ValueError, match="not the state of a Loader: it has no n, shuffle"):
        loader.load_state_dict({"seed": 0, "epoch": 0, "samples": 0})


# ---- bad samples


def test_an_error_of_the_users_code_names_the_sample():
    for workers in (0, 2):
        with (
            Loader(Numbers(30, raises=17), batch=10, workers=workers, shuffle=False) as loader,
            pytest.raises(SampleError, match=r"sample 17: KeyError.*no such key") as caught,
        ):
            labels(loader)
        assert isinstance(caught.value.__cause__, KeyError)
        assert loader.position == Position(0, 0, 10)


def test_a_bad_sample_is_an_error_with_its_name():
    with pytest.raises(BadSample, match=r"folder/7\.jpg: the file is empty"):
        list(Loader(Files(20, bad=(7,)), batch=10, decode=decode, workers=1))


def test_bad_samples_are_left_out_counted_and_named():
    bad = (3, 14, 15, 59)
    ranks = loaders(Files(60, bad), 3, batch=12, decode=decode, on_bad="skip", last="keep")
    for epoch in (1, 2):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            done = [list(loader.steps()) for loader in ranks]
        assert [len(steps) for steps in done] == [5] * 3
        assert sorted(int(x[0, 0, 0]) for steps in done for s in steps for batch, _ in s.micro for x in batch) == sorted(
            {*range(60)} - {*bad}
        )
        assert sum(step.samples for steps in done for step in steps) == 56
        assert sum(loader.skipped_count for loader in ranks) == 4 * epoch
        names = Counter(skipped for loader in ranks for skipped in loader.skipped)
        assert names == Counter({(f"folder/{i}.jpg", "the file is empty"): epoch for i in bad})
        assert len(told) == sum(1 for loader in ranks if loader.skipped_count)  # once per epoch and rank that met one


def test_a_batch_of_bad_samples_only_is_empty():
    with pytest.warns(UserWarning, match=r"epoch 0: left out folder/0\.jpg: the file is empty"):
        batches = list(Loader(Files(12, bad=(0, 1, 2, 3)), batch=4, decode=decode, on_bad="skip", shuffle=False))
    assert [tuple(x.shape) for x, _ in batches] == [(0, 3, 4, 4), (4, 3, 4, 4), (4, 3, 4, 4)]
    with pytest.raises(SampleError, match="none of"):
        list(Loader(Files(4, bad=(0, 1, 2, 3)), batch=4, decode=decode, on_bad="skip", workers=0))


def test_samples_that_do_not_fit_together_are_named():
    ragged = [torch.zeros(2), torch.zeros(3)]
    with pytest.raises(SampleError, match="sample 0, sample 1 do not make one batch"):
        list(Loader(ragged, batch=2, shuffle=False))
    with pytest.raises(SampleError, match=r"transform failed on sample 0, sample 1, .*ZeroDivisionError"):
        list(Loader(ARRAYS, batch=10, shuffle=False, transform=lambda x, draws: 1 / 0))


# ---- threads


def settled(count):
    """Whether `count` samples have been read, and no more though there is time."""
    until = time.monotonic() + 10
    while Counted.read < count and time.monotonic() < until:
        time.sleep(0.005)
    time.sleep(0.05)
    return Counted.read == count


def test_prefetch_is_bounded():
    Counted.read = 0
    with Loader(Counted(1000), batch=10, workers=2, prefetch=3) as loader:
        for i, _ in enumerate(itertools.islice(loader, 3)):
            assert settled(10 * (i + 1 + 2 * 3))


def test_the_queue_goes_on_across_epochs():
    Counted.read = 0
    with Loader(Counted(40), batch=10, workers=1, prefetch=2) as loader:
        list(loader)
        assert settled(60)


def test_waiting_costs_nothing():
    with Loader(Numbers(8, slow=0.05), batch=8, workers=1, shuffle=False) as loader:
        before = time.process_time()
        list(loader)  # 0.4 s of sleep in the worker
        assert time.process_time() - before < 0.1


def our_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("phalanx loader")]


def test_nothing_is_left_running():
    gc.collect()
    before = len(our_threads())
    loader = Loader(Numbers(100, slow=0.001), batch=10, workers=3)
    next(iter(loader))
    assert len(our_threads()) == before + 3
    loader.close()
    loader.close()
    assert len(our_threads()) == before
    with pytest.raises(RuntimeError, match="closed"):
        next(iter(loader))


def test_a_loader_that_is_forgotten_ends_too():
    gc.collect()
    before = len(our_threads())
    loader = Loader(Numbers(100), batch=10, workers=3)
    next(iter(loader))
    assert len(our_threads()) == before + 3
    del loader
    gc.collect()
    assert len(our_threads()) == before


class Whole(Python):
    """An interpreter that is forked with torch imported, and whose end is the subject of the test."""

    ends_wholly = True


def test_the_interpreter_leaves_though_much_is_prefetched():
    warm()
    program = """
    from tests.data.stand_ins import Numbers
    from phalanx.data import Loader
    loader = Loader(Numbers(10_000, slow=0.1), batch=5, workers=2, prefetch=240)  # a minute of work is ordered
    next(iter(loader))
    print("leaving", flush=True)
    """
    with Whole(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as done:
        assert done.stdout.readline() == "leaving\n"
        begun = time.monotonic()
        try:
            _, errors = done.communicate(timeout=60)
        finally:
            done.kill()
    ours = errors.partition("nanobind: leaked")[0]  # of torch 2.15's Triton, which ends with a list of its own leaks
    assert (done.returncode, ours) == (0, "")
    assert time.monotonic() - begun < 20


# ---- options


def test_default_workers_share_the_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(32)))

    class Host(World):
        intra_size = 8

    assert Loader(Files(), batch=8, decode=decode).workers == 8
    assert Loader(Files(), Host(0, 16), batch=16, decode=decode).workers == 3
    assert Loader(Numbers(), batch=8).workers == 0  # it may draw from generators that threads share
    assert Loader(Numbers(), batch=8, kind="process").workers == 8
    assert Loader(ARRAYS, batch=8).workers == 1
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert Loader(Files(), Host(0, 16), batch=16, decode=decode).workers == 1


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Loader(Numbers(100), World(0, 3), batch=100), ValueError, "nearest that do are 99 and 102"),
        (lambda: Loader(Numbers(10), batch=11), ValueError, "last='drop' would leave out all"),
        (lambda: Loader([], batch=1), ValueError, "no samples"),
        (lambda: Loader(Numbers(10), batch=0), ValueError, "batch=0"),
        (lambda: Loader(Numbers(10), batch=1.5), TypeError, "batch=1.5"),
        (lambda: Loader(Numbers(10), batch=1, seed=-1), ValueError, "seed=-1"),
        (lambda: Loader(Numbers(10), batch=1, workers=-1), ValueError, "workers=-1"),
        (lambda: Loader(Numbers(10), batch=1, prefetch=0), ValueError, "prefetch=0"),
        (lambda: Loader(Numbers(10), batch=1, last="wrap"), ValueError, "last='wrap'"),
        (lambda: Loader(Numbers(10), batch=1, kind="fork"), ValueError, "kind='fork'"),
        (lambda: Loader(Numbers(10), batch=1, on_bad="ignore"), ValueError, "on_bad='ignore'"),
        (lambda: Loader(Numbers(10), batch=1, decode=decode), ValueError, "decode= is for sources of encoded images"),
        (lambda: Loader(Files(10), batch=1), ValueError, "pass decode="),
        (lambda: Loader(ARRAYS, batch=1, kind="process"), ValueError, "would copy data"),
        (lambda: Loader(scatter_dataset(COLUMNS, World(0, 2)), World(0, 2), batch=2), ValueError, "give the Loader the whole"),
        (lambda: list(Loader(Nested(4), batch=2, transform=noise)), TypeError, "a transform needs"),
    ],
)
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_pinning_needs_something_to_pin_for():
    with pytest.raises(ValueError, match="no accelerator"):
        Loader(Numbers(10), batch=1, pin_memory=True)
    assert not next(iter(Loader(Numbers(10), batch=1)))[0].is_pinned()


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")
def test_batches_are_pinned():
    assert all(x.is_pinned() and y.is_pinned() for x, y in Loader(Numbers(10), batch=2))


def test_other_data_sets_are_collated_as_torch_does():
    ((x,),) = Loader((torch.arange(6).float(),), batch=6, shuffle=False)
    assert x.tolist() == [0, 1, 2, 3, 4, 5]
    (batch,) = Loader(torch.arange(6).reshape(3, 2), batch=3, shuffle=False)
    assert batch.tolist() == [[0, 1], [2, 3], [4, 5]]
    (batch,) = Loader(torch.utils.data.TensorDataset(*COLUMNS), batch=100, shuffle=False)
    assert labels([batch]) == list(range(100))
    (batch,) = Loader(Nested(3), batch=3, shuffle=False)
    assert batch["text"] == ["sample 0", "sample 1", "sample 2"]
    assert batch["pair"][0].tolist() == [[0, 0], [1, -1], [2, -2]]


# ---- the real thing


def test_digits_on_a_communicator():
    """Ranks in one world go through an epoch of real data: each image once."""
    digits = phalanx.data.open("digits", split="test")

    def epoch(comm):
        with Loader(digits, comm, batch=30, last="keep") as loader:
            return [(x.flatten().tolist(), int(k)) for images, y in loader for x, k in zip(images, y)]

    expected = Counter((tuple(x.flatten().tolist()), int(k)) for x, k in zip(digits.x, digits.y))
    assert Counter((tuple(x), k) for rank in phalanx.run_local(3, epoch) for x, k in rank) == expected
    assert expected.total() == 360


def test_a_folder_of_jpegs(tmp_path):
    image_module = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for number in range(12):
        folder = tmp_path / ("cats" if number % 2 else "dogs")
        folder.mkdir(exist_ok=True)
        pixels = rng.integers(0, 256, (40 + number, 60 - number, 3), dtype=np.uint8)
        image_module.fromarray(pixels).save(folder / f"{number:02}.jpg", quality=90)
    damaged = tmp_path / "cats" / "07.jpg"
    source = phalanx.data.open(f"imagefolder:{tmp_path}")
    options = {
        "decode": phalanx.data.RandomResizedCrop(16),
        "transform": phalanx.data.Normalise((0.5, 0.5, 0.5), (0.2, 0.2, 0.2)),
        "last": "keep",
        "seed": 1,
    }
    ((x, y),) = Loader(source, batch=12, **options)
    assert x.shape == (12, 3, 16, 16)
    assert x.dtype == torch.float32
    assert sorted(y.tolist()) == [0] * 6 + [1] * 6
    ranks = [next(iter(loader)) for loader in loaders(source, 3, batch=12, workers=2, **options)]
    assert torch.equal(torch.cat([part for part, _ in ranks]), x)

    damaged.write_bytes(damaged.read_bytes()[:300])
    with pytest.raises(BadSample, match=r"07\.jpg"):
        list(Loader(source, batch=12, **options))
    loader = Loader(source, batch=12, on_bad="skip", **options)
    with pytest.warns(UserWarning, match=r"07\.jpg"):
        ((x, y),) = loader
    assert len(x) == len(y) == 11
    assert [name.rpartition("/")[2] for name, _ in loader.skipped] == ["07.jpg"]


DOCS = re.findall(
    r"^```python\n(.*?)^```", (Path(__file__).parents[2] / "docs" / "data.md").read_text(), re.MULTILINE | re.DOTALL
)


def test_there_are_examples():
    assert len(DOCS) >= 4


@pytest.mark.parametrize("code", DOCS)
def test_the_examples_of_the_documentation_run(code):
    exec(compile(code, "data.md", "exec"), {})


# ---- on a GPU


def test_threads_pin_on_the_gpu_of_their_rank(monkeypatch):
    """A new thread is on GPU 0: pinning there would open a context on a GPU that belongs to another rank."""
    current, pinned = threading.local(), []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(current, "device", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(current, "device", device))
    monkeypatch.setattr(
        torch.Tensor, "pin_memory", lambda x: pinned.append((threading.get_ident(), torch.cuda.current_device())) or x
    )
    torch.cuda.set_device(3)
    for source, options in ((ARRAYS, {}), (Files(24), {"decode": decode, "workers": 3}), (Numbers(24), {"workers": 2})):
        with Loader(source, batch=4, **options) as loader:
            for _ in loader:
                pass
    assert pinned
    assert threading.get_ident() not in {thread for thread, _ in pinned}
    assert {device for _, device in pinned} == {3}
