"""Scatter: every rank's share is an index; shares together are everything, and the user's data are neither copied nor sent."""

import itertools

import numpy as np
import pytest
import torch
from tests.data.stand_ins import World
from torch.utils.data import DataLoader, Dataset, TensorDataset

import phalanx
from phalanx.data import epoch_order, scatter_dataset, scatter_index

SIZES = range(1, 41)


class Squares(Dataset):
    """A map-style data set that refuses to be pickled or copied."""

    def __len__(self):
        return 100

    def __getitem__(self, i):
        return torch.tensor(float(i * i)), i

    def __reduce__(self):
        raise AssertionError("a data set was pickled")

    def __deepcopy__(self, memo):
        raise AssertionError("a data set was copied")


def test_equal_shares_cover_everything():
    for size in SIZES:
        for n in range(1, 120):
            shares = [scatter_index(n, size, rank) for rank in range(size)]
            assert {len(part) for part in shares} == {-(-n // size)}
            assert set().union(*shares) == set(range(n))


def test_strict_shares_are_a_partition():
    for size in SIZES:
        for n in range(120):
            shares = [scatter_index(n, size, rank, equal_length=False) for rank in range(size)]
            assert [place for part in shares for place in part] == list(range(n))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 4, 4), "rank=4 of size=4: ranks are 0 to 3"),
        ((10, 4, -1), "rank=-1"),
        ((10, 0, 0), "size=0"),
        ((-1, 4, 0), "n=-1"),
        ((0, 4, 0), "equal_length=False"),
        ((True, 4, 0), "n=True"),
    ],
)
def test_bad_numbers(arguments, message):
    with pytest.raises(ValueError, match=message):
        scatter_index(*arguments)


def test_a_fraction_is_no_number():
    with pytest.raises(TypeError, match=r"n=2\.5"):
        scatter_index(2.5, 1, 0)


DATA = {
    "list": list("abcdefghijklmnopq"),
    "tensor": torch.arange(34).reshape(17, 2),
    "array": np.arange(17),
    "tuple of tensors": (torch.arange(17) * 10, torch.arange(17)),
    "tuple of samples": tuple(range(17)),
    "TensorDataset": TensorDataset(torch.arange(17) * 10, torch.arange(17)),
    "map-style": Squares(),
}


def plain(sample):
    return [part.tolist() if hasattr(part, "tolist") else part for part in (sample if isinstance(sample, tuple) else (sample,))]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("name", sorted(DATA))
def test_shards_are_views(name, shuffle):
    data = DATA[name]
    whole = scatter_dataset(data, World(0, 1))
    for size in (1, 2, 3, 5, 8):
        shards = [scatter_dataset(data, World(rank, size), shuffle=shuffle, seed=4, equal_length=False) for rank in range(size)]
        order = [int(i) for shard in shards for i in shard.indices]
        assert order == (epoch_order(4, 0, len(whole)).tolist() if shuffle else list(range(len(whole))))
        assert [plain(x) for shard in shards for x in (shard[i] for i in range(len(shard)))] == [plain(whole[i]) for i in order]
        assert all(shard.dataset is data for shard in shards)


def test_a_shard_reads_like_a_sequence():
    shard = scatter_dataset(list(range(100, 120)), World(1, 2), shuffle=True, seed=1)
    values = [shard[i] for i in range(len(shard))]
    assert len(shard) == 10
    assert list(shard) == values
    assert shard[-1] == values[-1]
    assert list(shard[2:8:3]) == values[2:8:3]
    assert list(shard[::-1]) == values[::-1]
    for outside in (10, -11):
        with pytest.raises(IndexError, match="of a shard of 10"):
            shard[outside]


def test_seeds_shuffle_differently_and_alike_on_all_ranks():
    first = [scatter_dataset(range(50), World(rank, 4), shuffle=True, seed=0).indices.tolist() for rank in range(4)]
    again = [scatter_dataset(range(50), World(rank, 4), shuffle=True, seed=0).indices.tolist() for rank in range(4)]
    other = [scatter_dataset(range(50), World(rank, 4), shuffle=True, seed=1).indices.tolist() for rank in range(4)]
    assert first == again != other
    assert set().union(*map(set, first)) == set(range(50))


def test_torchs_loader_takes_a_shard():
    shards = [scatter_dataset(Squares(), World(rank, 3), shuffle=True, equal_length=False) for rank in range(3)]
    seen = [int(i) for shard in shards for _, labels in DataLoader(shard, batch_size=7, shuffle=True) for i in labels]
    assert sorted(seen) == list(range(100))


def test_a_communicator_will_do():
    data = list(range(10))
    shares = phalanx.run_local(3, lambda comm: list(scatter_dataset(data, comm, equal_length=False)))
    assert list(itertools.chain(*shares)) == data


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (iter([1]), TypeError, "needs __len__ and __getitem__"),
        (torch.tensor(1.0), TypeError, "without dimensions"),
        ((torch.zeros(3), torch.zeros(4)), ValueError, "3, 4 rows"),
        ([], ValueError, "n=0"),
    ],
)
def test_bad_data(data, error, message):
    with pytest.raises(error, match=message):
        scatter_dataset(data, World(0, 2))
