"""Signed keys: what ranks of the job wrote is read, what anybody else wrote counts as not written, and is reported once."""

import datetime
import threading
import time

import pytest
import torch.distributed as dist

from phalanx.comm.signed import SignedStore, Signer, peek

SECRET, TOKEN = "0123456789abcdef" * 4, "a" * 16
SECONDS = datetime.timedelta(seconds=20)


@pytest.fixture(params=["hash", "tcp", "file"])
def store(request, tmp_path):
    if request.param == "tcp":
        return dist.TCPStore("127.0.0.1", 0, 1, True, SECONDS, wait_for_workers=False)
    return dist.HashStore() if request.param == "hash" else dist.FileStore(str(tmp_path / "store"), 1)


def keys(store, prefix="p", secret=SECRET, token=TOKEN, seconds=20.0):
    return SignedStore(store, prefix, Signer(secret, token), seconds)


def forgeries(store):
    """Values of the key p/k that no rank has written, each by its name."""
    ours = dist.PrefixStore("p", store)
    values = {}
    for name, other in {
        "of another key": (keys(store), "other"),
        "of another prefix": (keys(store, prefix="q"), "k"),
        "of another meeting": (keys(store, token="b" * 16), "k"),
        "with another secret": (keys(store, secret="f" * 64), "k"),
    }.items():
        other[0].set(other[1], "alarm")
        values[name] = other[0]._store.get(other[1])  # as anybody can read it
    keys(store).set("k", "alarm")
    true = ours.get("k")
    values["plain"], values["empty"], values["a number"], values["bytes"] = b"alarm", b"", b"1", b"\xff\x00\xfe" * 50
    values["cut"], values["longer"], values["bare"] = true[:-1], true + b"x", true[:64]
    for position in range(0, len(true), 7):
        values[f"bit of byte {position}"] = true[:position] + bytes([true[position] ^ 1]) + true[position + 1 :]
    for key in ("k", "other"):
        ours.delete_key(key)
    return values


def test_what_ranks_write_reads_back(store):
    mine, other = keys(store), keys(store)
    values = {"a": "", "b": "one two", "c": "ä\n\0", "d": "x" * 5000}
    mine.multi_set(list(values), list(values.values()))
    assert other.multi_get(list(values)) == [value.encode() for value in values.values()]
    assert other.get("b") == b"one two"
    assert other.check(["a", "b"])
    assert not other.check(["a", "z"])
    other.wait(["a", "b"], SECONDS)
    assert mine.compare_set("e", "", "0") == other.compare_set("e", "", "1") == b"0"
    assert mine.delete_key("a")
    assert not mine.check(["a"])


def test_what_others_wrote_counts_as_not_written(store, caplog):
    ours, mine = dist.PrefixStore("p", store), keys(store, seconds=0.2)
    for name, value in forgeries(store).items():
        ours.set("k", value)
        assert not mine.check(["k"]), name
        assert mine.compare_set("k", "", "true") == b"true", f"{name}: a rank writes over it"
        assert mine.get("k") == b"true"
    assert [record.getMessage() for record in caplog.records if "no rank of this job wrote it" in record.getMessage()] == [
        caplog.records[0].getMessage()
    ], "once"
    ours.set("k", "forged")
    for read in (lambda: mine.get("k"), lambda: mine.wait(["k"], datetime.timedelta(seconds=0.2))):
        with pytest.raises(RuntimeError, match="no rank of this job has written p/k"):
            read()


def test_a_reader_waits_on_until_a_rank_writes(store):
    ours, mine, other = dist.PrefixStore("p", store), keys(store), keys(store)
    for read in (lambda: mine.get("k"), lambda: mine.wait(["k"], SECONDS) or mine.get("k")):
        ours.set("k", "forged")
        writer = threading.Timer(0.2, other.set, ["k", "true"])
        writer.start()
        begun = time.monotonic()
        assert read() == b"true"
        assert time.monotonic() - begun > 0.1
        writer.join()


def test_to_look_at_a_key_neither_waits_nor_makes_it(store):
    assert peek(store, "nothing") is None
    assert not store.check(["nothing"])
    for value in (b"", b"x", b"\xff\x00"):
        store.set("something", value)
        assert peek(store, "something") == value


def test_the_secret_is_in_no_value_and_no_message(store, caplog):
    mine = keys(store, seconds=0.1)
    mine.set("k", "value")
    dist.PrefixStore("p", store).set("z", "forged")
    assert not mine.check(["z"])
    told = dist.PrefixStore("p", store).get("k").decode() + caplog.text + repr(vars(mine._signer).keys()) + repr(mine)
    assert SECRET not in told
