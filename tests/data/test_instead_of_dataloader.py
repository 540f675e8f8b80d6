"""A Loader where a DataLoader was: the same batches for the same data, whoever makes them, and a sentence where it differs."""

import collections
import dataclasses
import inspect
import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.stand_ins import Files, Numbers, Texts, World, decode, masked, padded
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

import phalanx
from phalanx.data import BatchPlan, Loader, SampleError, Stage, epoch_order
from phalanx.data.loader_options import OF_A_DATALOADER

Pair = collections.namedtuple("Pair", "x y")


@dataclasses.dataclass
class Graph:
    """A batch of a user's own class."""

    nodes: torch.Tensor
    names: list

    def pin_memory(self):
        return self


class Opaque:
    """A batch that nobody can look into."""

    def __init__(self, samples):
        self.x = torch.stack([x for x, _ in samples])


def graph(samples):
    return Graph(torch.cat([x for x, _ in samples]), [f"node {i}" for _, i in samples])


TENSORS = TensorDataset(torch.arange(24.0).view(12, 2), torch.arange(12))
IDIOMS = {
    "dicts": Texts(11),
    "tensors": TENSORS,
    "a subset": Subset(TENSORS, [7, 3, 11, 0, 5]),
    "a subset of dicts": Subset(Texts(20), range(3, 14, 2)),
    "two data sets": ConcatDataset([TENSORS, Subset(TENSORS, [1, 2])]),
    "a list of tuples": [(float(i), [i, i + 1], f"text {i}") for i in range(9)],
    "a list of numbers": [i * 0.5 for i in range(7)],
    "a list of texts": [f"text {i}" for i in range(7)],
    "arrays": [(np.full((2, 2), i, dtype=np.float32), np.int64(i)) for i in range(7)],
    "named tuples": [Pair(torch.tensor(i), {"deep": (i, "t")}) for i in range(7)],
    "bytes and None-like numbers": [(b"bytes", True, i) for i in range(5)],
}


def same(ours, theirs):
    """Whether two batches are equal; a list of torch's may be a tuple of ours at the top."""
    if isinstance(theirs, torch.Tensor):
        assert isinstance(ours, torch.Tensor)
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, list | tuple):
        assert type(ours) is type(theirs) or (type(ours), type(theirs)) == (tuple, list)
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return type(ours) is type(theirs) and ours == theirs


@pytest.mark.parametrize("name", IDIOMS)
def test_batches_are_those_of_a_dataloader(name):
    dataset = IDIOMS[name]
    collate_fn = padded if "dicts" in name else None  # they have lists of any length
    theirs = list(DataLoader(dataset, batch_size=3, collate_fn=collate_fn))
    for options in ({"workers": 0}, {"workers": 2}, {"workers": 2, "kind": "process"}):
        if options.get("kind") and isinstance(dataset, TensorDataset):
            continue
        with Loader(dataset, batch=3, shuffle=False, collate_fn=collate_fn, **options) as loader:
            assert len(loader) == len(theirs)
            ours = list(loader)
        assert all(map(same, ours, theirs))
        assert len(ours) == len(theirs)
        assert loader.dataset is dataset
        assert loader.batch_size == 3


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 50),
    ranks=st.integers(1, 4),
    per_rank=st.integers(1, 6),
    micro=st.none() | st.integers(1, 3),
    last=st.sampled_from(["drop", "pad", "keep"]),
    shuffle=st.booleans(),
    collates=st.booleans(),
    workers=st.sampled_from([0, 0, 2]),
    seed=st.integers(0, 3),
)
def test_any_world_has_the_samples_of_one_process_in_its_order(n, ranks, per_rank, micro, last, shuffle, collates, workers, seed):
    batch = ranks * per_rank
    if (micro is not None and per_rank > micro and per_rank % micro) or (last == "drop" and batch > n):
        return
    options = {
        "batch": batch,
        "micro_batch": micro,
        "last": last,
        "shuffle": shuffle,
        "seed": seed,
        "collate_fn": padded if collates else None,
    }
    dataset = Texts(n) if collates else [{"label": i} for i in range(n)]
    order = epoch_order(seed, 0, n).tolist() if shuffle else list(range(n))
    until = {"drop": n // batch * batch, "pad": -(-n // batch) * batch, "keep": n}[last]
    expected = [(order * batch)[:until][start : start + batch] for start in range(0, until, batch)]
    loaders = [Loader(dataset, World(rank, ranks), workers=workers, **options) for rank in range(ranks)]
    found, states = [], []
    for loader in loaders:
        steps = []
        for step in loader.steps():
            steps.append([int(i) for part in step.micro for i in part["label"]])
            if loader is loaders[0]:
                states.append(loader.state_dict())
        found.append(steps)
        loader.close()
    assert [list(itertools.chain(*parts)) for parts in zip(*found)] == expected
    others = random.Random(n).choice([size for size in (1, 2, 3) if batch % size == 0])
    options["micro_batch"] = None
    for done, state in enumerate(states[:-1], 1):  # resumed at every position, on another number of ranks
        tails = []
        for rank in range(others):
            loader = Loader(dataset, World(rank, others), **options)
            loader.load_state_dict(state)
            tails.append([[int(i) for i in part["label"]] for part in loader])
        assert [list(itertools.chain(*parts)) for parts in zip(*tails)] == expected[done:]


# ---- collate_fn


def test_it_runs_in_the_worker_and_its_random_numbers_do_not_depend_on_it():
    def epoch(**options):
        phalanx.seed_everything(3)
        with Loader(Numbers(24), batch=6, collate_fn=masked, **options) as loader:
            return [(x.tolist(), torch.rand(()).item()) for _ in range(2) for x, _ in loader]

    assert epoch() == epoch() == epoch(workers=1, kind="process") == epoch(workers=3, kind="process")
    assert epoch(seed=1) != epoch()


def test_what_it_returns_may_be_anything_that_pickles():
    for options in ({}, {"workers": 1, "kind": "process"}):
        with Loader(Numbers(4), batch=2, shuffle=False, collate_fn=graph, **options) as loader:
            first, second = loader
        assert first.nodes.tolist() == [0, 1]
        assert second.names == ["node 2", "node 3"]
        with Loader(Numbers(4), batch=2, shuffle=False, collate_fn=Opaque, **options) as loader:
            assert [batch.x.tolist() for batch in loader] == [[[0], [1]], [[2], [3]]]
        with Loader(Numbers(4), batch=2, shuffle=False, collate_fn=lambda samples: samples, **options) as loader:
            assert [[i for _, i in samples] for samples in loader] == [[0, 1], [2, 3]]


def test_a_batch_that_does_not_pickle_is_an_error_of_one_sentence():
    with (
        Loader(Numbers(4), batch=2, collate_fn=lambda samples: lambda: samples, workers=1, kind="process") as loader,
        pytest.raises(SampleError, match="the batch cannot be sent from a worker process"),
    ):
        list(loader)


def test_it_gets_images_and_tensors_sample_by_sample():
    def texts(samples):
        return [f"{int(x[0, 0, 0])} {y}" for x, y in samples]

    (batch,) = Loader(Files(4), batch=4, decode=decode, shuffle=False, collate_fn=texts)
    assert batch == ["0 0", "1 1", "2 0", "3 1"]
    columns = torch.arange(4.0).view(4, 1), torch.arange(4)
    (batch,) = Loader(columns, batch=4, shuffle=False, collate_fn=len)
    assert batch == 4


def test_its_errors_name_the_samples():
    def fails(samples):
        raise ZeroDivisionError("in collate")

    for options in ({}, {"workers": 1, "kind": "process"}):
        with (
            Loader(Numbers(4), batch=2, shuffle=False, collate_fn=fails, **options) as loader,
            pytest.raises(SampleError, match="collate_fn failed on sample 0, sample 1: ZeroDivisionError: in collate") as caught,
        ):
            list(loader)
        cause = caught.value.__cause__
        assert isinstance(cause, ZeroDivisionError) or "in fails" in str(cause)


def time_first(samples):
    """Sequences as people gave them to an LSTM: time, batch."""
    return torch.nn.utils.rnn.pad_sequence([x for x, _ in samples]), [y for _, y in samples]


def test_a_rank_without_samples_gets_what_has_no_rows_whatever_collate_fn_makes():
    def empty(collate_fn, dataset):
        ranks = [list(Loader(dataset, World(rank, 3), batch=3, shuffle=False, collate_fn=collate_fn)) for rank in range(3)]
        return ranks[0][0]  # one sample among three ranks: the first two have none

    batch = empty(padded, Texts(1))
    assert {name: tuple(x.shape) for name, x in batch.items() if name != "text"} == {
        "input_ids": (0, 1), "lengths": (0,), "label": (0,)
    }  # fmt: skip
    assert batch["text"] == []
    x, y = empty(time_first, Numbers(1))
    assert (tuple(x.shape), y) == ((1, 0), [])
    assert empty(lambda samples: samples, Numbers(1)) == []
    found = empty(graph, Numbers(1))
    assert (tuple(found.nodes.shape), found.names) == ((0,), [])
    with pytest.raises(SampleError, match="cannot be made of Opaque: use last='drop'"):
        empty(Opaque, Numbers(1))


# ---- the other arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 32}, r"no batch_size: write batch=64: `batch` counts the samples of all ranks"),
        ({"num_workers": 4}, r"write workers=4, kind='process'"),
        ({"drop_last": True}, r"write last='drop' for True"),
        ({"sampler": [1, 2]}, r"no sampler: leave it out.*torch.utils.data.Subset"),
        ({"batch_sampler": [[1]]}, r"no batch_sampler: write batch="),
        ({"generator": torch.Generator()}, r"seed=generator.initial_seed\(\)"),
        ({"persistent_workers": True}, r"workers live until the loader is closed"),
        ({"prefetch_factor": 4}, r"write prefetch=4"),
        ({"timeout": 5}, r"noticed at once"),
        ({"pin_memory_device": "cuda"}, r"current accelerator"),
        ({"in_order": False}, r"always come in order"),
        ({"bach": 32}, r"unexpected keyword argument 'bach'"),
        ({}, r"needs batch="),
        ({"batch": 2, "collate_fn": 3}, r"collate_fn=3: must be a function"),
        ({"batch": 2, "kind": "process", "worker_init_fn": 3}, r"worker_init_fn=3: must be a function"),
    ],
)
def test_arguments_of_a_dataloader_get_a_sentence_with_the_equivalent(arguments, message):
    with pytest.raises(TypeError, match=message):
        Loader(Numbers(10), World(0, 2), **arguments)


def test_every_argument_of_a_dataloader_is_taken_or_refused_with_a_sentence():
    theirs = set(inspect.signature(DataLoader.__init__).parameters) - {"self", "dataset"}
    ours = set(inspect.signature(Loader.__init__).parameters)
    assert theirs - ours == set(OF_A_DATALOADER) & theirs
    assert not ours & set(OF_A_DATALOADER)


def test_misplaced_arguments():
    with pytest.raises(TypeError, match="comm=32: the second argument is a communicator"):
        Loader(Numbers(10), 32, batch=2)
    for name in ({"worker_init_fn": print}, {"multiprocessing_context": "fork"}):
        with pytest.raises(ValueError, match="is for worker processes: pass kind='process'"):
            Loader(Numbers(10), batch=2, **name)
    with pytest.raises(ValueError, match="multiprocessing_context='threads': must be one of"):
        Loader(Numbers(10), batch=2, kind="process", multiprocessing_context="threads")


def test_batch_size_is_what_one_rank_gets_at_a_time():
    plan = BatchPlan([Stage(epochs=1, batch=8), Stage(epochs=1, batch=24)])
    loader = Loader(Numbers(48), World(1, 2), batch=plan, micro_batch=6)
    assert Loader(Numbers(48), World(1, 2), batch=12).batch_size == 6
    for epoch in range(3):
        sizes = {loader.batch_size, *(len(x) for x, _ in loader)}
        assert sizes == {[4, 6, 6][epoch]}


def test_the_length_is_the_same_in_all_epochs():
    loader = Loader(Numbers(50), World(0, 2), batch=8, last="keep")
    lengths = [len(loader)]
    for _ in range(3):
        lengths += [len(loader) for _ in loader]
        lengths.append(len(loader))
    assert set(lengths) == {7}
