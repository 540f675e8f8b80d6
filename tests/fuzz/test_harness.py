"""The net itself: parsers that misbehave are caught, each for what it does."""

import pytest
from tests.fuzz.harness import Parser, blocks, fuzz
from tests.fuzz.mutate import BINARY, JSON, TEXT


def test_a_parser_that_succeeds_or_refuses_passes():
    def read(data):
        if data[:1] == b"x":
            raise ValueError("no")

    outcomes = fuzz(Parser("calm", read, (ValueError,), (b"hello", b"world"), BINARY), range(200))
    assert sum(outcomes.values()) == 200
    assert outcomes["accepted"] > 100


@pytest.mark.parametrize(
    ("name", "misbehave", "told"),
    [
        ("wrong error", lambda: {}[1], "KeyError"),
        ("endless", lambda: [None for _ in iter(int, 1)], "of processor time"),
        ("hungry", lambda: len(bytes(b"x" * 60_000_000)), "MB"),
        ("very hungry", lambda: bytearray(1 << 40), "MemoryError"),
        ("talkative", lambda: (_ for _ in ()).throw(ValueError("x" * 100_000)), "a message of 100000"),
    ],
)
def test_a_parser_that_misbehaves_is_caught(name, misbehave, told):
    def read(data):
        if data != b"seed":
            misbehave()

    with pytest.raises(AssertionError, match=told):
        fuzz(Parser(name, read, (ValueError,), (b"seed",), BINARY), range(30), seconds=0.3, megabytes=40)


def test_a_parser_that_sleeps_is_caught(monkeypatch):
    import threading

    monkeypatch.setattr("tests.fuzz.harness.PATIENCE", 0.3)
    never = threading.Event()
    with pytest.raises(AssertionError, match="on the clock"):
        fuzz(Parser("asleep", lambda data: data != b"seed" and never.wait(20), (), (b"seed",), BINARY), range(10), seconds=0.2)


def test_a_seed_that_is_refused_is_a_mistake_of_the_test():
    def refuse(data):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fuzz(Parser("none", refuse, (ValueError,), (b"seed",), BINARY), range(10))


@pytest.mark.parametrize("mutators", [BINARY, TEXT, JSON])
def test_a_case_is_the_same_every_time_and_seldom_the_seed(mutators):
    parser = Parser("same", len, (), (b'{"a": [1, 2.5, {"b": "text"}]}\n', b'["x", 3]'), mutators)
    made = [parser.case(number) for number in range(300)]
    assert made == [parser.case(number) for number in range(300)]
    assert len(set(made)) > 200


def test_blocks_cover_every_case_once(monkeypatch):
    monkeypatch.setattr("tests.fuzz.harness.CASES", 25_000)
    monkeypatch.setattr("tests.fuzz.harness.SHARDS", 2)
    seen = []
    for shard in range(2):
        monkeypatch.setattr("tests.fuzz.harness.SHARD", shard)
        seen += [number for block in blocks() for number in block]
    assert sorted(seen) == list(range(25_000))
