"""More than 2 GiB in one tensor and in one object: several engines count bytes in 31 bits.

They take half a minute and 12 GiB, so they run where PHALANX_TEST_LARGE=1 asks for them, as CI does.
"""

import os

import pytest
import torch

COUNT = 2**31 + 5
WANTED = 12 << 30  # bytes of memory: the object exists up to five times on two ranks


def available():
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


pytestmark = [
    pytest.mark.skipif(
        os.environ.get("PHALANX_TEST_LARGE") != "1", reason="half a minute and 12 GiB: PHALANX_TEST_LARGE=1 runs it"
    ),
    pytest.mark.skipif(
        available() < WANTED, reason=f"{available() / 2**30:.0f} GiB of memory available, {WANTED >> 30} GiB wanted"
    ),
]

PLACES = [0, 1, 2**28 - 1, 2**28, 2**30 + 1, 2**31 - 1, 2**31, COUNT - 1]  # around the edges of pieces and of 31 bits


def marked():
    x = torch.zeros(COUNT, dtype=torch.uint8)
    for i, place in enumerate(PLACES):
        x[place] = i + 1
    return x


def check(x):
    assert x.dtype == torch.uint8
    assert x.shape == (COUNT,)
    assert x[PLACES].tolist() == [i + 1 for i in range(len(PLACES))]
    assert x[12_345].item() == 0


def bcast_tensor(comm):
    check(comm.bcast(marked() if comm.rank == 1 else None, root=1))


def test_a_tensor(pair):
    pair.run(bcast_tensor, deadline=60)


def send_object(comm):
    """A send, which goes another way than a bcast."""
    if comm.rank == 0:
        comm.send_obj(["begin", bytes(COUNT), ("end",)], 1)
    else:
        begin, middle, end = comm.recv_obj(0)
        assert (begin, type(middle), len(middle), end) == ("begin", bytes, COUNT, ("end",))


def test_an_object(pair):
    pair.run(send_object, deadline=60)
    pair.kill()  # gives the memory back, whatever the allocators keep
