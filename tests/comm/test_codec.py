"""The codec: exact for plain data, a TypeError for anything else, a ValueError for bytes that it did not write."""

import collections
import contextlib
import math
import pickle
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long import times

from phalanx.comm.codec import MAX_DEPTH, decode, encode

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
keys = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=20,
)


def shape(value):
    """The value with its types spelled out, and floats as bits: what == overlooks."""
    if isinstance(value, list | tuple):
        return type(value), [shape(item) for item in value]
    if isinstance(value, dict):
        return dict, [(shape(key), shape(item)) for key, item in value.items()]
    return type(value), struct.pack("<d", value) if isinstance(value, float) else value


@given(values)
@settings(max_examples=times(300, seldom=100), deadline=None)
def test_round_trip(value):
    assert shape(decode(bytes(encode(value)))) == shape(value)


@pytest.mark.parametrize(
    "value",
    [2**k + d for k in (7, 8, 15, 16, 31, 63, 64, 1000) for d in (-1, 0, 1)]
    + [-(2**k) + d for k in (7, 8, 15, 63, 64, 1000) for d in (-1, 0, 1)],
)
def test_integers_at_the_edges_of_bytes(value):
    assert decode(encode(value)) == value


def test_lone_surrogates_nan_bits_and_deep_data_survive():
    assert decode(encode("\ud800x")) == "\ud800x"
    assert math.copysign(1, decode(encode(-0.0))) == -1
    payload = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000001234))[0]
    assert struct.pack("<d", decode(encode(payload))) == struct.pack("<d", payload)
    deep = []
    for _ in range(MAX_DEPTH - 1):
        deep = [deep]
    assert decode(encode(deep)) == deep


def test_dicts_keep_their_order():
    assert list(decode(encode({"b": 1, "a": 2, 3: 4}))) == ["b", "a", 3]


@pytest.mark.parametrize(
    "value", [{1}, 1j, bytearray(b"x"), range(3), object, collections.OrderedDict(), collections.Counter("a"), Ellipsis]
)
def test_other_types_are_named(value):
    kind = type(value)
    for hidden, where in [
        (value, "the object is"),
        ([0, value], r"the object\[1\] is"),
        ({"k": (value,)}, r"the object\['k'\]\[0\] is"),
    ]:
        with pytest.raises(TypeError, match=f"{where} a {kind.__module__}.{kind.__qualname__}"):
            encode(hidden)


def test_a_key_is_named_as_a_key():
    with pytest.raises(TypeError, match="a key of the object"):
        encode({frozenset(): 1})


def test_cycles_are_refused():
    endless = {}
    endless["again"] = endless
    with pytest.raises(TypeError, match="cycle"):
        encode(endless)


# ---- bytes from a stranger ----------------------------------------------------------------------------------------------------


@given(st.binary(max_size=60))
@settings(max_examples=times(500, seldom=200), deadline=None)
def test_any_bytes_give_a_value_or_a_value_error(data):
    with contextlib.suppress(ValueError):
        decode(data)


@given(values, st.data())
@settings(max_examples=times(100, seldom=40), deadline=None)
def test_what_is_cut_short_or_has_a_tail_is_refused(value, data):
    whole = bytes(encode(value))
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(ValueError):
        decode(whole[:cut])
    with pytest.raises(ValueError, match="1 bytes left over"):
        decode(whole + b"N")


@pytest.mark.parametrize("letter", [b"l", b"t", b"d", b"s", b"b", b"i"])
def test_a_huge_length_allocates_nothing(letter):
    for length in (2**63, 2**64 - 1):
        with pytest.raises(ValueError, match="cut short"):
            decode(letter + struct.pack("<Q", length))


def test_deep_bytes_do_not_exhaust_the_stack():
    with pytest.raises(ValueError, match="deep"):
        decode((b"l" + struct.pack("<Q", 1)) * 100_000 + b"N")


def test_an_unhashable_key_is_refused():
    empty_list = b"l" + struct.pack("<Q", 0)
    with pytest.raises(ValueError, match="key"):
        decode(b"d" + struct.pack("<Q", 1) + empty_list + b"N")


class Trap:
    """Pickled, it runs what it likes."""

    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


def test_a_pickle_is_not_executed():
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(ValueError):
            decode(pickle.dumps(Trap(), protocol))
