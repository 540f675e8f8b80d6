"""Nested state as JSON and named tensors: all comes back, bit for bit and kind for kind; what cannot is refused by name."""

import json
import math
import struct
from collections import Counter, OrderedDict

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long import times

from phalanx.train.checkpoint.tree import clone, decode, encode, references, storable

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e5m2,
]  # fmt: skip


def through_json(value):
    """As a file does it: the tree as text, the tensors as the file format has them."""
    tree, tensors = encode(value, "state")
    assert references(tree) == set(tensors)
    return decode(json.loads(json.dumps(tree, allow_nan=False)), {name: storable(x).clone() for name, x in tensors.items()})


def bits(value):
    """A value that is equal for two states only if they are the same in kind and in every bit."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        return "tensor", str(value.dtype), tuple(value.shape), bytes(raw.tolist())
    if isinstance(value, numpy.ndarray | numpy.generic):
        return type(value).__name__, str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, float):
        return "float", struct.pack("d", value)
    if isinstance(value, dict):
        return type(value).__name__, [(bits(key), bits(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value).__name__, [bits(item) for item in value]
    return type(value).__name__, value


tensors = st.builds(
    lambda dtype, shape, seed: (
        torch.randint(0, 256, (math.prod(shape) * 16,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))[
            : math.prod(shape) * dtype.itemsize
        ]
        .clone()
        .view(dtype)
        .view(shape)
        if dtype is not torch.bool
        else torch.ones(shape, dtype=torch.bool)
    ),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 99),
)
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=True), st.text(), st.binary(max_size=9), tensors,
    st.sampled_from(DTYPES), st.just(torch.device("cpu")), st.just(torch.Size([2, 3])),
)  # fmt: skip
keys = st.one_of(st.text(max_size=5), st.integers(), st.tuples(st.integers(), st.text(max_size=2)))
states = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple), st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=times(150, seldom=60), deadline=None)
@given(states)
def test_everything_comes_back(state):
    assert bits(through_json(state)) == bits(state)


@pytest.mark.parametrize(
    "value",
    [
        -0.0, math.inf, -math.inf, 5e-324, struct.unpack("d", b"\x01\x02\x03\x04\x05\x06\xf8\x7f")[0], 1 << 200, -(1 << 64),
        "\udc80", "", {1: "a", "1": "b", (1, 2): "c", None: "d", False: "e"}, Counter({30: 1, 60: 2}), numpy.float32(0.1),
        numpy.int64(7), numpy.arange(6, dtype="uint32").reshape(2, 3)[:, ::2], numpy.zeros((0, 2), "float16"), {"tensor": "x"},
        {"pairs": []}, [[[]]],
    ],
    ids=repr,
)  # fmt: skip
def test_hard_cases(value):
    assert bits(through_json(value)) == bits(value)


def test_the_judge_sees_what_equality_does_not():
    assert bits(0.0) != bits(-0.0)
    assert bits([1]) != bits((1,))
    assert bits(torch.zeros(2)) != bits(torch.zeros(2).neg())


def test_a_module_with_its_versions():
    state = torch.nn.BatchNorm1d(3).state_dict()
    found = through_json(state)
    assert type(found) is OrderedDict
    assert found._metadata == state._metadata
    assert bits(dict(found)) == bits(dict(state))


def test_tied_tensors_stay_tied_and_are_stored_once():
    x = torch.arange(4.0)
    tree, named = encode({"a": x, "b": [x], "c": x[1:]}, "m")
    assert list(named) == ["m/a", "m/c"]
    found = decode(tree, named)
    assert found["a"] is found["b"][0]


def test_names_that_would_clash_do_not():
    value = {"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)}
    assert bits(through_json(value)) == bits(value)


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(24.0).view(2, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(12.0)[::3],
        torch.arange(3.0).expand(2, 3),
        torch.randn(3, dtype=torch.complex64).conj(),
    ],
    ids=["channels_last", "transposed", "strided", "expanded", "conjugate"],
)
def test_layouts(x):
    found = through_json(x)
    assert bits(found) == bits(x)
    assert found.stride() == torch.empty_like(x).stride()


def test_a_clone_shares_nothing_with_its_original():
    x = torch.zeros(2)
    state = {"a": x, "b": x}
    copy = clone(state)
    x += 1
    assert copy["a"].tolist() == [0, 0]
    assert copy["a"] is copy["b"]


def cycle():
    x: list = []
    x.append(x)
    return x


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": [1, {2}]}, "a.1 is a builtins.set"),
        ({"f": print}, "f is a builtins.builtin_function"),
        ({"s": torch.eye(2).to_sparse()}, "s is a Tensor with torch.sparse_coo"),
        ({"m": torch.empty(2, device="meta")}, "on meta"),
        (numpy.array(["a"]), "numpy.ndarray"),
        (cycle(), "a cycle"),
    ],
)
def test_what_cannot_be_saved_is_named(value, where):
    with pytest.raises(TypeError, match=where):
        encode(value, "thing")


@pytest.mark.parametrize(
    "tree",
    [
        {}, {"pickle": "x"}, {"tuple": 3}, {"pairs": [[1]]}, {"float": "zz"}, {"dtype": "nn"}, {"bytes": 3}, {"ordered": []},
        {"tensor": "absent", "dtype": "float32", "shape": [1]}, {"tensor": "x", "dtype": "float32", "shape": [3]},
        {"tensor": "x", "dtype": "float64", "shape": [2]}, {"pairs": [[[], 1]]}, {"device": "moon"}, {"size": ["a"]},
    ],
    ids=repr,
)  # fmt: skip
def test_malformed_trees_are_refused(tree):
    with pytest.raises(ValueError):
        decode(tree, {"x": torch.zeros(2)})
