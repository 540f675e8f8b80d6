"""Arguments as text: what is read is what was written, and nonsense is one line."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long import times

from phalanx.train.argument_text import check_arguments, read_argument, write_argument
from phalanx.train.setting_text import LARGEST, ConfigError

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-LARGEST, LARGEST)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
)


@settings(max_examples=times(400, seldom=160), deadline=None)
@given(st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4), max_leaves=12))
def test_what_is_written_is_read(value):
    try:
        check_arguments({"x": value}, "args")
    except ValueError:
        return  # lists in lists in lists
    found = read_argument(write_argument(value), "x")
    assert found == value
    assert type(found) is type(value)


@settings(max_examples=times(400, seldom=160), deadline=None)
@given(st.text(max_size=30))
def test_any_text_is_a_value_or_one_line(text):
    try:
        value = read_argument(text, "model.args.x")
    except ConfigError:
        return
    check_arguments({"x": value}, "args")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("64", 64), ("-3", -3), ("1_000", 1000), ("1e-3", 1e-3), (".5", 0.5), ("3.", 3.0), ("True", True), ("false", False),
        ("none", None), ("null", None), ("relu", "relu"), ("", ""), ("a,b", "a,b"), ('"64"', "64"), ("'true'", "true"),
        ("[]", []), ("[0.9,0.95]", [0.9, 0.95]), ("[1, [2, x], 'a,b', none]", [1, [2, "x"], "a,b", None]), ("[1,]", [1]),
        ("gelu(tanh)", "gelu(tanh)"), ("2024-01-01", "2024-01-01"), ("٣", "٣"),
    ],
)  # fmt: skip
def test_values(text, value):
    found = read_argument(text, "x")
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[1", "a list ends with ]"), ("[1,,2]", "a value is missing"), ("[1] 2", "'2' follows the end"),
        ('"a', "quote is not closed"), ("'a", "quote is not closed"), ("inf", "a finite number"), ("nan", "a finite number"),
        ("9" * 400, "a finite number"), ("1e999", "a finite number"), ("[" * 9 + "]" * 9, "at most 8 lists"),
        ("[" * 100_000, "at most 8 lists"), ("['a' 'b']", "separated by commas"),
    ],
)  # fmt: skip
def test_nonsense(text, told):
    with pytest.raises(ConfigError, match=told) as caught:
        read_argument(text, "model.args.x")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "args", [{"a b": 1}, {1: 1}, {"x": object()}, {"x": {"y": 1}}, {"x": float("inf")}, {"x": [2**60]}, [("x", 1)], "x=1"]
)
def test_what_a_recipe_may_not_give(args):
    with pytest.raises(ValueError, match="args"):
        check_arguments(args, "args")
