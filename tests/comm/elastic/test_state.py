"""The state of a run on its way to a newcomer: everything arrives as it was, once, and damage is noticed."""

from collections import Counter, OrderedDict

import pytest
import torch

import phalanx
from phalanx.comm.elastic import state


@pytest.fixture(params=[state.PIECE, 7], ids=["one piece", "many pieces"], autouse=True)
def piece(request, monkeypatch):
    monkeypatch.setattr(state, "PIECE", request.param)
    return request.param


@pytest.fixture(params=["messages", "broadcasts"])
def way(request):
    """How ranks 0 and 1 reach each other."""
    if request.param == "messages":
        return lambda comm: state.Messages(comm, 1 - comm.rank)
    return lambda comm: state.Broadcasts(comm, 0)


def travelled(way, sent, damage=lambda x: None):
    """What rank 1 gets of a state that rank 0 sends. `damage` may change a piece on its way."""
    generator = torch.get_rng_state()  # a newcomer gets random numbers of its own, and here it is a thread of this process

    def run(comm):
        own = way(comm)
        if comm.rank == 0:
            state.send_state(own, sent)
            return None
        real = own.take

        def take(nbytes):
            x = real(nbytes)
            damage(x)
            return x

        own.take = take
        return state.receive_state(own, member=7)

    try:
        return phalanx.run_local(2, run)[1]
    finally:
        torch.set_rng_state(generator)


def test_every_kind_of_value_arrives_as_it_was(way):
    weight = torch.randn(3, 4)
    sent = {
        "plain": [None, True, 3, 2.5, "text", b"bytes", (1, "two"), torch.Size([2, 3]), torch.float16],
        "kinds": OrderedDict(a=Counter({"x": 2}), b={1: {}}),
        "tensors": [
            weight,
            torch.empty(0, 5),
            torch.tensor(1.5, dtype=torch.bfloat16),
            torch.randn(2, 2, dtype=torch.complex64),
            torch.arange(6).reshape(2, 3).t(),
            torch.tensor([True, False]),
        ],
    }
    found = travelled(way, sent)
    assert found["plain"] == sent["plain"]
    assert found["kinds"] == sent["kinds"]
    assert type(found["kinds"]) is OrderedDict
    assert type(found["kinds"]["a"]) is Counter
    for mine, other in zip(found["tensors"], sent["tensors"], strict=True):
        assert (mine.dtype, mine.shape) == (other.dtype, other.shape)
        assert torch.equal(mine, other)


def test_a_tensor_that_is_there_twice_travels_once_but_a_view_of_it_is_another(way, piece):
    weight, empty = torch.randn(4, 4), torch.empty(0)
    parts = []
    sent = {"model": {"w": weight}, "parameters": [weight.detach(), weight.t(), weight[:2]], "empty": [empty, empty]}
    found = travelled(way, sent, damage=lambda x: parts.append(x.numel()))
    assert sum(parts) == 4 * (16 + 16 + 8)  # bytes
    assert len(parts) == -(-160 // piece)
    assert found["model"]["w"] is found["parameters"][0]
    assert torch.equal(found["parameters"][1], weight.t())
    assert torch.equal(found["parameters"][2], weight[:2])


def test_a_flipped_bit_is_noticed(way, piece):
    seen = []

    def damage(x):
        seen.append(x)
        if len(seen) == 1:
            x[3] ^= 1

    with pytest.raises(state.StateDamagedError, match="piece 0 of the state that rank 0 sent arrived with different bits"):
        travelled(way, {"a": torch.randn(5), "b": torch.randn(6)}, damage)


@pytest.mark.parametrize("nbytes", [0, 6, 7, 8, 14, 15])
def test_who_has_the_state_can_listen_to_a_broadcast(nbytes):
    """Ranks 1 and 3 are new, rank 2 sends, and rank 0 has to take as many pieces as they do."""
    sent = {"x": torch.arange(nbytes, dtype=torch.uint8)}
    generator = torch.get_rng_state()

    def run(comm):
        way, found = state.Broadcasts(comm, 2), None
        if comm.rank == 2:
            state.send_state(way, sent)
        elif comm.rank == 0:
            state.overhear_state(way)
        else:
            found = state.receive_state(way, member=comm.rank)["x"]
        assert comm.bcast(torch.ones(1) if comm.rank == 2 else None, 2).tolist() == [1.0]  # not mistaken for a piece
        return found

    try:
        found = phalanx.run_local(4, run)
    finally:
        torch.set_rng_state(generator)
    assert torch.equal(found[1], sent["x"])
    assert torch.equal(found[3], sent["x"])


@pytest.mark.parametrize("shared", [True, False], ids=["broadcast", "messages"])
def test_all_newcomers_get_the_state_of_one_rank(shared, monkeypatch):
    """Rank 3 has the state already."""
    generator = torch.get_rng_state()
    monkeypatch.setattr(phalanx.Communicator, "shares_memory", shared)

    def run(comm):
        found = state.hand_over(comm, 1, (0, 2), lambda: {"from": comm.rank, "x": torch.ones(3)}, member=10 + comm.rank)
        comm.barrier()
        return found

    try:
        found = phalanx.run_local(4, run)
    finally:
        torch.set_rng_state(generator)
    assert found[1] is found[3] is None
    for rank in (0, 2):
        assert found[rank]["from"] == 1
        assert torch.equal(found[rank]["x"], torch.ones(3))


def test_what_cannot_travel_is_named(way):
    with pytest.raises(TypeError, match=r"the state\['model'\]\['hook'\] is a builtins.set"):
        travelled(way, {"model": {"hook": {1, 2}}})


def test_a_checksum_sees_flipped_bits_and_what_changed_places():
    """On lengths around a whole number of rows of words."""
    row = 8 * state.COLUMNS
    for length in (0, 1, row - 1, row, row + 1, 3 * row + 5):
        piece = torch.randint(256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(length))
        before = state._checksum(piece)
        assert before == state._checksum(piece.clone())
        for at in {0, 7, length // 2, length - 1} & set(range(length)):
            for bit in range(8):
                piece[at] ^= 1 << bit
                assert state._checksum(piece) != before
                piece[at] ^= 1 << bit
        if length > 16:
            assert state._checksum(piece.roll(8)) != before
        if length > 2 * row:
            swapped = torch.cat([piece[row : 2 * row], piece[:row], piece[2 * row :]])
            assert state._checksum(swapped) != before
            for at in (7, row - 1):  # the highest bits of two words of a column: their sum does not change
                for bit in (1 << 7, 1 << 3):
                    piece[[at, at + row]] ^= bit
                    assert state._checksum(piece) != before
                    piece[[at, at + row]] ^= bit
