"""What travels between ranks as plain data: the value comes out, or ValueError. The round trip is in tests/comm/test_codec.py."""

import pytest
from tests.fuzz.harness import Parser, blocks, fuzz
from tests.fuzz.mutate import BINARY

from phalanx.comm.codec import decode, encode

VALUES = (
    None,
    [True, False, 0, -1, 2**70, 1.5, float("nan")],
    {"key": ("tuple", b"bytes"), 3: [[[]]], (1, "two"): {}},
    ["é", "\ud800", "x" * 40, b"\0" * 40],
    [[[[[[[[[[1]]]]]]]]]],
)


def read(data):
    """The value of what was read is written and read again."""
    value = decode(data)
    again = encode(value)
    assert encode(decode(again)) == again


PARSER = Parser("codec", read, (ValueError,), tuple(bytes(encode(value)) for value in VALUES), BINARY)


@pytest.mark.parametrize("cases", blocks())
def test_codec(cases):
    assert set(fuzz(PARSER, cases)) == {"accepted", "refused"}
