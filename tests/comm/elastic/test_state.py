"""The state of a run on its way to a newcomer: everything arrives as it was, once, and damage is noticed."""

from collections import Counter, OrderedDict

import pytest
import torch

import phalanx
from phalanx.comm.elastic.state import StateDamagedError, receive_state, send_state


def travelled(state, damage=lambda x: None):
    """What rank 1 gets of a state that rank 0 sends, and how many tensors travel. `damage` may change one on its way."""
    generator = torch.get_rng_state()  # a newcomer gets random numbers of its own, and here it is a thread of this process

    def run(comm):
        if comm.rank == 0:
            send_state(comm, 1, state)
            return None, 0
        received, real = [], comm.recv

        def recv(*args):
            received.append(real(*args))
            damage(received[-1])
            return received[-1]

        comm.recv = recv
        return receive_state(comm, 0, member=7), len(received) - 2  # the structure, and the checksums

    try:
        return phalanx.run_local(2, run)[1]
    finally:
        torch.set_rng_state(generator)


def test_every_kind_of_value_arrives_as_it_was():
    weight = torch.randn(3, 4)
    state = {
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
    found, _ = travelled(state)
    assert found["plain"] == state["plain"]
    assert found["kinds"] == state["kinds"]
    assert type(found["kinds"]) is OrderedDict
    assert type(found["kinds"]["a"]) is Counter
    for mine, sent in zip(found["tensors"], state["tensors"], strict=True):
        assert (mine.dtype, mine.shape) == (sent.dtype, sent.shape)
        assert torch.equal(mine, sent)


def test_a_tensor_that_is_there_twice_travels_once_but_a_view_of_it_is_another():
    weight, empty = torch.randn(4, 4), torch.empty(0)
    state = {"model": {"w": weight}, "parameters": [weight.detach(), weight.t(), weight[:2]], "empty": [empty, empty]}
    found, count = travelled(state)
    assert count == 5
    assert found["model"]["w"] is found["parameters"][0]
    assert torch.equal(found["parameters"][1], weight.t())
    assert torch.equal(found["parameters"][2], weight[:2])


@pytest.mark.parametrize("number", [0, 2])
def test_a_flipped_bit_is_noticed(number):
    state = {"a": torch.randn(5), "b": torch.randn(6), "c": torch.randn(7)}
    victim = list(state.values())[number]

    def damage(x):
        if x.shape == victim.shape and x.dtype == victim.dtype:
            x.view(torch.int32)[0] ^= 1

    with pytest.raises(StateDamagedError, match=f"tensor {number} of the state that rank 0 sent"):
        travelled(state, damage)


def test_what_cannot_travel_is_named():
    with pytest.raises(TypeError, match=r"the state\['model'\]\['hook'\] is a builtins.set"):
        travelled({"model": {"hook": {1, 2}}})
