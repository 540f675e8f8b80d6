"""Data sets that can only be iterated over: each item on exactly one rank, ends that all ranks see, and resuming by skipping."""

import itertools
import json
import multiprocessing
import os
import random
import signal
import threading
from collections import Counter

import pytest
import torch
from tests.data.stand_ins import Shards, Stream, World, masked
from torch.utils.data import DataLoader

import phalanx
from phalanx.data import BatchPlan, Loader, Position, SampleError, Stage, StreamShare, stream_share


def labels(batches):
    return [int(i) for _, y in batches for i in y]


def together(ranks):
    """The items of a step in the order of the stream: item k of a step is on rank k % ranks."""
    mixed = itertools.chain(*itertools.zip_longest(*ranks))
    return [i for i in mixed if i is not None]


# ---- the loader shares the items out


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("last", ["keep", "drop"])
def test_each_item_is_on_exactly_one_rank(size, last):
    drawn = random.Random(size)
    for _ in range(12):
        n, batch, micro = drawn.randint(1, 60), size * drawn.choice([1, 2, 4]), drawn.choice([None, 1, 2])
        if last == "drop" and n < batch:
            continue
        ranks = [
            list(Loader(Stream(n), World(rank, size), batch=batch, micro_batch=micro, last=last).steps()) for rank in range(size)
        ]
        until = n if last == "keep" else n // batch * batch
        assert {len(steps) for steps in ranks} == {-(-until // batch)}
        for s, parts in enumerate(zip(*ranks)):
            assert {step.batch for step in parts} == {min(batch, until - s * batch)}
            assert len({len(step.micro) for step in parts}) == 1
            assert sum(step.samples for step in parts) == parts[0].batch
            here = list(range(s * batch, min((s + 1) * batch, until)))
            assert together([labels(step.micro) for step in parts]) == here
            assert max(step.samples for step in parts) - min(step.samples for step in parts) <= 1


def test_one_rank_has_what_a_dataloader_has():
    theirs = list(DataLoader(Stream(23), batch_size=4))
    for options in ({}, {"workers": 1}):
        with Loader(Stream(23), batch=4, **options) as loader:
            for (x, y), (same_x, same_y) in zip(loader, theirs, strict=True):
                assert torch.equal(x, same_x)
                assert torch.equal(y, same_y)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_resumed_at_every_position_on_any_number_of_ranks(size):
    n, batch = 26, 6

    def tail(position, size):
        parts = []
        for rank in range(size):
            loader = Loader(Stream(n, draws=True), World(rank, size), batch=batch, seed=4)
            loader.load_state_dict(position)
            parts.append(list(loader.steps()))
        return [sorted(row for step in steps for x, _ in step.micro for row in x.tolist()) for steps in zip(*parts)]

    loader = Loader(Stream(n, draws=True), batch=batch, seed=4)
    whole = [sorted(row for x, _ in step.micro for row in x.tolist()) for step in loader.steps()]
    again = Loader(Stream(n, draws=True), batch=batch, seed=4)
    states = [json.loads(json.dumps(again.state_dict())) for _ in again.steps()]  # after each step
    assert [state["samples"] for state in states] == [6, 12, 18, 24, 0]
    for done, state in enumerate(states[:-1], 1):
        assert tail(state, size) == whole[done:]
    assert states[-1] | {"epoch": 1} == states[-1]


def test_a_state_at_an_end_that_was_not_known_goes_on_with_the_next_epoch():
    loader = Loader(Stream(10), batch=4, last="drop")
    for _ in itertools.islice(loader, 2):
        pass
    assert loader.position == Position(0, 0, 8)  # two items are left, which make no batch
    assert labels(loader) == list(range(8))
    assert loader.position == Position(0, 2)


def test_the_next_epoch_begins_again_and_is_told_its_number():
    dataset = Stream(10, draws=True)
    loader = Loader(dataset, batch=5)
    epochs = [[x.tolist() for x, _ in loader] for _ in range(3)]
    assert dataset.epoch == 2
    assert epochs[0] != epochs[1] != epochs[2]  # other random numbers
    assert loader.position == Position(0, 3)
    loader.seek(Position(0, 1))
    assert [x.tolist() for x, _ in loader] == epochs[1]


def test_random_numbers_do_not_depend_on_ranks_and_training_is_not_disturbed():
    def rows(rank, size, **options):
        phalanx.seed_everything(5)
        found, drawn = {}, []
        with Loader(Stream(18, draws=True), World(rank, size), batch=6, seed=3, **options) as loader:
            for x, y in loader:
                drawn.append((torch.rand(()).item(), random.random()))
                found |= {int(i): row.tolist() for i, row in zip(y, x)}
        return found, drawn

    whole, drawn = rows(0, 1)
    phalanx.seed_everything(5)
    assert [(torch.rand(()).item(), random.random()) for _ in drawn] == drawn
    assert rows(0, 3)[0] | rows(1, 3)[0] | rows(2, 3)[0] == whole
    assert rows(0, 1, workers=1, kind="process") == (whole, drawn)


def test_collate_fn_of_a_stream_may_draw():
    def epoch(**options):
        with Loader(Stream(12, draws=True), batch=4, collate_fn=masked, **options) as loader:
            return [x.tolist() for x, _ in loader]

    assert epoch() == epoch() == epoch(workers=1, kind="process")
    assert epoch(seed=1) != epoch()


def test_the_length_is_that_of_the_data_set_if_it_has_one():
    plan = BatchPlan([Stage(epochs=1, batch=8), Stage(epochs=1, batch=16)])
    loader = Loader(Stream(50, length=True), World(1, 2), batch=plan, micro_batch=2)
    for epoch in range(3):
        length = len(loader)
        assert length == len(list(loader))
        assert loader.steps_per_epoch(epoch) == [7, 4, 4][epoch]
    with pytest.raises(TypeError, match="no length"):
        len(Loader(Stream(50), batch=2))
    assert Loader(Stream(50), batch=2).state_dict()["n"] is None


def test_ranks_without_an_item_in_the_last_batch_get_one_without_rows():
    ranks = [list(Loader(Stream(7), World(rank, 3), batch=6)) for rank in range(3)]
    assert [[tuple(x.shape) for x, _ in batches] for batches in ranks] == [[(2, 2), (1, 2)], [(2, 2), (0, 2)], [(2, 2), (0, 2)]]


def test_errors_name_the_item_and_the_loader_goes_on_there():
    for options in ({}, {"workers": 1}, {"workers": 1, "kind": "process"}):
        with Loader(Stream(20, raises=9), batch=4, **options) as loader:
            for _ in range(2):
                with pytest.raises(SampleError, match=r"item 9 of the stream: KeyError.*no such key") as caught:
                    list(loader)
                assert loader.position == Position(0, 0, 8)
            trace = caught.value.__cause__
            assert isinstance(trace, KeyError) or "stand_ins.py" in str(trace)


class KilledOnce(Stream):
    """The first process that comes to item 9 is killed."""

    def __init__(self, n):
        super().__init__(n)
        self.killed = multiprocessing.get_context("fork").Event()

    def __iter__(self):
        for x, i in super().__iter__():
            if i == 9 and not self.killed.is_set():
                self.killed.set()
                os.kill(os.getpid(), signal.SIGKILL)
            yield x, i


def test_a_killed_process_is_replaced_and_skips():
    with (
        Loader(KilledOnce(20), batch=4, workers=1, kind="process") as loader,
        pytest.warns(RuntimeWarning, match="reading item 9 of the stream; the loader starts another one"),
    ):
        assert labels(loader) == list(range(20))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"shuffle": True}, ValueError, "its own order"),
        ({"last": "pad"}, ValueError, "does not begin again"),
        ({"on_bad": "skip"}, ValueError, "does not continue"),
        ({"workers": 2}, ValueError, "sharded=True"),
        ({"batch": 3, "comm": World(0, 2)}, ValueError, "does not divide over 2 ranks"),
        ({"sharded": True, "comm": World(0, 2)}, TypeError, "must be a communicator"),
        ({"source": iter([1, 2])}, TypeError, "used up after one epoch"),
        ({"source": [1, 2], "sharded": True}, ValueError, "for an IterableDataset"),
    ],
)
def test_what_a_stream_cannot_do(options, error, message):
    with pytest.raises(error, match=message):
        Loader(**({"source": Stream(8), "batch": 2} | options))


def test_a_stream_that_fills_no_batch_is_an_error_and_not_an_epoch_without_steps():
    with pytest.raises(SampleError, match="has 3 items: no batch of 4; take a smaller batch"):
        list(Loader(Stream(3), batch=4, last="drop"))
    with pytest.raises(SampleError, match="has 0 items"):
        list(Loader(Stream(0), batch=4))


# ---- the data set shards itself


def trained(comm, dataset, *, steps=None, state=None, **options):
    """What a rank got: [(labels, batch)], with an all-reduce in each step as training has one."""
    found = []
    with Loader(dataset, comm, sharded=True, **options) as loader:
        if state is not None:
            loader.load_state_dict(state)
        for step in itertools.islice(loader.steps(), steps):
            samples = comm.all_reduce(torch.tensor([float(step.samples)]))
            assert int(samples) == step.batch
            assert {type(x) for x, _ in step.micro} == {torch.Tensor}
            found.append((labels(step.micro), step.batch, len(step.micro)))
        return found, loader.position, loader.state_dict()


def items(dataset, size, workers=1):
    count = size * workers
    return Counter(s + k * count for s, length in enumerate(dataset.lengths[:count]) for k in range(length))


@pytest.mark.parametrize(("size", "lengths"), [(2, (10, 3)), (2, (1, 8)), (3, (5, 9, 2)), (3, (4, 4, 4)), (1, (7,))])
@pytest.mark.parametrize("micro_batch", [None, 1])
def test_unequal_ends_do_not_hang_and_lose_nothing(size, lengths, micro_batch):
    dataset = Shards(lengths)
    ranks = phalanx.run_local(size, lambda comm: trained(comm, dataset, batch=2 * size, last="keep", micro_batch=micro_batch))
    assert {len(found) for found, _, _ in ranks} == {-(-max(lengths) // 2)}
    assert {position for _, position, _ in ranks} == {Position(0, 1)}
    assert Counter(i for found, _, _ in ranks for own, _, _ in found for i in own) == items(dataset, size)
    assert len({tuple((batch, parts) for _, batch, parts in found) for found, _, _ in ranks}) == 1


@pytest.mark.parametrize(("size", "lengths"), [(2, (10, 5)), (3, (5, 9, 2)), (3, (4, 4, 4))])
def test_with_drop_the_epoch_ends_with_the_shortest_share(size, lengths):
    ranks = phalanx.run_local(size, lambda comm: trained(comm, Shards(lengths), batch=2 * size, last="drop"))
    for rank, (found, position, _) in enumerate(ranks):
        assert [own for own, _, _ in found] == [
            [rank + 2 * s * size, rank + (2 * s + 1) * size] for s in range(min(lengths) // 2)
        ]
        assert position == Position(0, 1)


def test_an_empty_share():
    with pytest.raises(Exception, match="no item in the whole epoch"):
        phalanx.run_local(2, lambda comm: trained(comm, Shards((4, 0)), batch=2, last="keep"))
    with pytest.raises(Exception, match="1 of 2 ranks have no batch in epoch 0"):
        phalanx.run_local(2, lambda comm: trained(comm, Shards((4, 0)), batch=2, last="drop"))


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_each_worker_has_a_share(kind):
    dataset = Shards((5, 2, 7, 1))
    if kind == "process":  # ranks that are threads would fork while others compute
        found, position, _ = trained(phalanx.create_communicator(), dataset, batch=2, last="keep", workers=4, kind=kind)
        ranks = [(found, position)]
        assert [own for own, _, _ in found][:4] == [[0, 4], [1, 5], [2, 6], [3]]  # in turn
    else:
        ranks = phalanx.run_local(2, lambda comm: trained(comm, dataset, batch=4, last="keep", workers=2, kind=kind)[:2])
    assert Counter(i for found, _ in ranks for own, _, _ in found for i in own) == items(dataset, 4)


@pytest.mark.parametrize("lengths", [(10, 3, 6, 5), (2, 9, 9, 1)])
@pytest.mark.parametrize("last", ["keep", "drop"])
def test_resumed_at_every_step(lengths, last):
    dataset, options = Shards(lengths), {"batch": 4, "last": last, "workers": 2}
    whole = phalanx.run_local(2, lambda comm: trained(comm, dataset, **options))
    for steps in range(1, len(whole[0][0])):
        saved = phalanx.run_local(2, lambda comm, steps=steps: trained(comm, dataset, steps=steps, **options))
        state = json.loads(json.dumps(saved[0][2]))
        resumed = phalanx.run_local(2, lambda comm, state=state: trained(comm, dataset, state=state, **options))
        assert [[*before[0], *after[0]] for before, after in zip(saved, resumed)] == [found for found, _, _ in whole]
    with pytest.raises(ValueError, match="shares"):
        Loader(dataset, batch=4, sharded=True, workers=1).load_state_dict(state)


def test_the_share_is_the_whole_stream_elsewhere():
    assert stream_share() == StreamShare(0, 1, 0, 1)
    seen = []

    class Looks(Stream):
        def __iter__(self):
            seen.append((stream_share(), threading.current_thread().name))
            return super().__iter__()

    with Loader(Looks(4), World(1, 2), batch=2, workers=1) as loader:
        list(loader)
    assert seen[0] == (StreamShare(0, 1, 0, 1), "phalanx loader 0")
    list(Loader(Looks(4), batch=2, sharded=True))
    assert seen[-1][0] == StreamShare(0, 1, 0, 1)
    assert (StreamShare(2, 3, 1, 4).index, StreamShare(2, 3, 1, 4).count) == (9, 12)
