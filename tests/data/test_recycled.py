"""Memory of dead batches: used again, never while somebody can still see it, and never without bound."""

import gc
import subprocess
import sys
import threading

import pytest
import torch

from phalanx.data import recycled

SHAPE = (16, 1 << 17)  # 2 MiB even of bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_the_memory_of_a_dead_tensor_serves_the_next(dtype):
    first = recycled.empty(SHAPE, dtype)
    assert (first.shape, first.dtype, first.is_contiguous()) == (SHAPE, dtype, True)
    address = first.data_ptr()
    del first
    assert recycled.empty(SHAPE, dtype).data_ptr() == address


@pytest.mark.parametrize("keep", [lambda x: x[1:2, 3:], lambda x: x.view(-1), lambda x: x.numpy(), lambda x: x.detach()])
def test_memory_that_can_still_be_seen_stays(keep):
    whole = recycled.empty(SHAPE, torch.float32).fill_(1)
    address = whole.data_ptr()
    part = keep(whole)
    del whole
    gc.collect()
    other = recycled.empty(SHAPE, torch.float32).fill_(2)
    assert other.data_ptr() != address
    assert float(part.max()) == 1


BOUND = """
import os
from pathlib import Path
import torch
from phalanx.data import recycled

def mapped():
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")

size = 40 << 20  # above 32 MiB malloc maps and unmaps every block by itself; untouched, it takes no memory
before = mapped()
blocks = [recycled.empty((size,), torch.uint8) for _ in range(3 * recycled.MOST_FREE)]
assert mapped() - before >= len(blocks) * size
blocks.clear()
assert mapped() - before < (recycled.MOST_FREE + 1) * size
for small in range(recycled.MOST_FREE):  # smaller ones drive them out
    del blocks[:]
    blocks += [recycled.empty(((2 << 20) + small,), torch.uint8)]
blocks.clear()
assert mapped() - before < 2 * size
"""


@pytest.mark.usefixtures("warm_python")
def test_what_is_kept_free_has_a_bound():
    """In a process of its own: what other tests have freed, and how they set malloc, would count."""
    subprocess.run([sys.executable, "-c", BOUND], check=True, timeout=120)


def test_threads_never_share_a_block():
    wrong = []

    def work(mine: int) -> None:
        for _ in range(200):
            x = recycled.empty(SHAPE, torch.float32)
            x[:, :100] = mine
            if not bool((x[:, :100] == mine).all()):
                wrong.append(mine)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert wrong == []
