"""A place that a stranger may have written: nothing but a segment of this job is mapped, and no file of anybody is touched."""

import fcntl
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from phalanx.native import core
from phalanx.native.team import HostTeam

pytestmark = pytest.mark.skipif(bool(core.UNAVAILABLE), reason=core.UNAVAILABLE or "available")

MEMFD, NAMED = 0, 1
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@pytest.fixture(scope="module")
def size():
    """Bytes of a control segment of two ranks."""
    team = core._native.Team(0, 2, None, MEMFD, 5.0)
    number = int(team.place.split(":")[2])
    return os.stat(f"/proc/self/fd/{number}").st_size


def refused(place, words):
    with pytest.raises(OSError, match=words):
        core._native.Team(1, 2, place, MEMFD, 5.0)


def place_of(number, nonce=None):
    return f"memfd:{os.getpid()}:{number}:{(nonce or secrets.token_bytes(16))[::-1].hex()}"


def words_of(nonce):
    """A nonce as it lies in memory and as a place has it: two numbers of 64 bits, each the highest digit first."""
    return "".join(f"{int.from_bytes(nonce[i : i + 8], 'little'):016x}" for i in (0, 8))


@pytest.mark.parametrize("method", [MEMFD, NAMED])
def test_negative_control_a_segment_of_this_job_is_opened(method):
    first = core._native.Team(0, 2, None, method, 5.0)
    second = core._native.Team(1, 2, first.place, method, 5.0)
    first.meet()
    assert not list(Path("/dev/shm").glob(f"phalanx-{os.getpid()}-*"))
    refused(first.place, "No such file|no segment|Permission")  # forgotten, as soon as all have come
    first.leave()
    second.leave()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "memfd",
        "/etc/passwd",
        "/proc/self/mem",
        "memfd:1:2",
        "memfd:1:2:",
        "memfd:1:2:" + "0" * 31,
        "memfd:1:2:" + "0" * 33,
        "memfd:1:2:" + "g" * 32,
        "memfd:-1:2:" + "0" * 32,
        "memfd:1:-2:" + "0" * 32,
        "memfd:1/../self:2:" + "0" * 32,
        "memfd:99999999999999999999:2:" + "0" * 32,
        "named:../../tmp/x:0:" + "0" * 32,
        "other:1:2:" + "0" * 32,
        "memfd:1:2:" + "0" * 32 + ":",
        ":" * 100,
        "x" * 100_000,
    ],
)
def test_text_that_is_no_place(text):
    refused(text, "not the place of a segment")


def a_file(path, size):
    path.write_bytes(b"precious" * (size // 8))
    return os.open(path, os.O_RDWR)


def an_empty_file(path, size):
    return os.open(path, os.O_RDWR | os.O_CREAT)


def random_bytes(path, size):
    path.write_bytes(secrets.token_bytes(size))
    return os.open(path, os.O_RDWR)


def a_large_file(path, size):
    path.write_bytes(bytes(2 * size))
    return os.open(path, os.O_RDWR)


def a_fifo(path, size):
    os.mkfifo(path)
    return os.open(path, os.O_RDWR)


def a_directory(path, size):
    path.mkdir()
    return os.open(path, os.O_RDONLY)


def a_deleted_file(path, size):
    number = a_file(path, size)
    path.unlink()
    return number


def a_socket(path, size):
    import socket

    return socket.socket().detach()


def a_device(path, size):
    return os.open("/dev/zero", os.O_RDWR)


@pytest.mark.parametrize(
    "make", [a_file, an_empty_file, random_bytes, a_large_file, a_fifo, a_directory, a_deleted_file, a_socket, a_device]
)
def test_a_descriptor_of_something_else_is_not_mapped(make, tmp_path, size):
    path = tmp_path / "victim"
    number = make(path, size)
    try:
        before = path.read_bytes() if path.is_file() else b""
        refused(place_of(number), "is no segment of this job|No such")
        assert (path.read_bytes() if path.is_file() else b"") == before
    finally:
        os.close(number)


def a_memfd(size, nonce=b"", seals=SEALS, flags=os.MFD_ALLOW_SEALING):
    number = os.memfd_create("phalanx", flags)
    os.ftruncate(number, size)
    os.pwrite(number, nonce, 0)
    if seals:
        fcntl.fcntl(number, fcntl.F_ADD_SEALS, seals)
    return number


@pytest.mark.parametrize(
    ("change", "seals", "nonce", "words"),
    [
        (0, SEALS, b"y" * 16, "does not begin with"),
        (4096, SEALS, b"x" * 16, "bytes instead of"),
        (-4096, SEALS, b"x" * 16, "bytes instead of"),
        (0, 0, b"x" * 16, "it may shrink"),
        (0, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL, b"x" * 16, "it may shrink"),
    ],
)
def test_a_memfd_that_is_another_or_could_shrink_is_not_mapped(size, change, seals, nonce, words):
    number = a_memfd(size + change, nonce, seals)
    try:
        refused(f"memfd:{os.getpid()}:{number}:{words_of(b'x' * 16)}", words)
    finally:
        os.close(number)


def test_negative_control_a_memfd_as_it_should_be_is_mapped(size):
    number = a_memfd(size, b"x" * 16)
    try:
        core._native.Team(1, 2, f"memfd:{os.getpid()}:{number}:{words_of(b'x' * 16)}", MEMFD, 5.0).leave()
    finally:
        os.close(number)


@pytest.fixture
def named(size):
    """The place and the path of a named segment, as its creator would make them; `bytes` begins with the nonce."""
    nonce = secrets.token_bytes(16)
    pid = os.getpid()
    path = Path(f"/dev/shm/phalanx-{pid}-{words_of(nonce)}")
    path.touch(mode=0o600)
    path.write_bytes(nonce + bytes(size - 16))
    yield f"named:{pid}:0:{words_of(nonce)}", path
    path.unlink(missing_ok=True)


def test_negative_control_a_named_segment_is_mapped(named):
    core._native.Team(1, 2, named[0], NAMED, 5.0).leave()


def behind_a_link(path, tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(path.read_bytes())
    victim.chmod(0o600)
    path.unlink()
    path.symlink_to(victim)


def with_another_name(path, tmp_path):
    other = path.with_name(path.name + "-other")
    os.link(path, other)
    return other


def that_others_can_open(path, tmp_path):
    path.chmod(0o644)


def of_another_user(path, tmp_path):
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(path, 65534, 65534)


def cut_short(path, tmp_path):
    os.truncate(path, 16)


def with_another_nonce(path, tmp_path):
    with path.open("r+b") as file:
        file.write(b"\1")


@pytest.mark.parametrize(
    "change", [behind_a_link, with_another_name, that_others_can_open, of_another_user, cut_short, with_another_nonce]
)
def test_a_named_segment_that_was_tampered_with_is_not_mapped(named, tmp_path, change):
    place, path = named
    left = change(path, tmp_path)
    try:
        before = path.read_bytes()
        refused(place, "is no segment of this job")
        assert path.read_bytes() == before
    finally:
        if left:
            left.unlink()


def test_nothing_stays_open_after_a_refusal(size):
    number = a_memfd(size, b"y" * 16)
    try:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            refused(f"memfd:{os.getpid()}:{number}:{words_of(b'x' * 16)}", "does not begin with")
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        os.close(number)


class Forged:
    """A store in which a stranger writes over the places that rank 0 tells."""

    def __init__(self, place):
        self._store, self._place = dist.HashStore(), place

    def set(self, key, value):
        self._store.set(key, self._place if key.split("/")[-2].startswith("place") else value)

    def __getattr__(self, name):
        return getattr(self._store, name)


@pytest.mark.parametrize("make", [a_file, an_empty_file, random_bytes, a_fifo, a_directory])
def test_ranks_that_are_pointed_at_something_else_live_and_share_no_memory(make, tmp_path, size, caplog):
    path = tmp_path / "victim"
    number = make(path, size)
    store = Forged(place_of(number))
    try:
        before = path.read_bytes() if path.is_file() else b""
        with ThreadPoolExecutor(2) as pool:
            teams = list(pool.map(lambda rank: HostTeam.join(store, rank, 2, timeout=20, name="world"), range(2)))
        assert teams == [None, None]
        assert (path.read_bytes() if path.is_file() else b"") == before
    finally:
        os.close(number)
    assert "rank 1 cannot" in caplog.text
    assert "is no segment of this job" in caplog.text
    assert store.num_keys() == 0  # what the ranks told each other is gone
