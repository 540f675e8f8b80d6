"""Memory of which each process gets its own pages where it writes."""

import os

import pytest
import torch

from phalanx.optim.copy_on_write import PAGE, HostMemory


@pytest.fixture
def memory():
    return HostMemory.create(3 * PAGE)


def words(memory, page=0, count=8):
    return memory.own(page * PAGE, (count,), (1,), torch.int64), memory.common(page * PAGE, count, torch.int64)


def test_what_is_written_for_all_is_seen_in_the_own_view(memory):
    own, common = words(memory)
    assert own.tolist() == [0] * 8
    common += 7
    assert own.tolist() == [7] * 8
    assert not memory.written()


@pytest.mark.parametrize("page", range(3))
def test_what_is_written_for_oneself_nobody_else_sees_and_is_noticed(memory, page):
    own, common = words(memory, page)
    own[3] = 5
    assert common.tolist() == [0] * 8
    assert memory.written()
    common += 1
    assert own.tolist() == [0, 0, 0, 5, 0, 0, 0, 0]  # a page that is its own no longer follows
    beside, for_all = words(memory, (page + 1) % 3)
    for_all += 1
    assert beside.tolist() == [1] * 8


def test_a_second_process_finds_it_by_its_path(memory):
    again = HostMemory.open(memory.path, 3 * PAGE)
    words(memory)[1].fill_(4)
    assert words(again)[0].tolist() == [4] * 8
    words(again)[0].zero_()
    assert (again.written(), memory.written()) == (True, False)
    memory.forget_path()
    with pytest.raises(OSError, match="No such file"):
        HostMemory.open(memory.path, PAGE)


def test_this_system_does_what_is_needed(memory):
    assert [memory.objection(rank) for rank in (0,)] == [""]
    other = HostMemory.open(memory.path, 3 * PAGE)
    assert other.objection(1) == ""
    assert not memory.written()


def test_a_mapping_that_does_not_follow_is_refused(memory):
    """As on a system where private mappings are copies: here, because the page was written already."""
    memory.own(3 * PAGE, (1,), (1,), torch.int64).fill_(1)
    assert "does not follow" in memory.objection(0)


def test_a_fork_is_noticed(memory):
    assert not memory.forked()
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    assert memory.forked()
    assert not HostMemory.create(PAGE).forked()


def test_tensors_keep_the_memory_and_have_storages_of_their_own():
    memory = HostMemory.create(PAGE)
    own, common = memory.own(64, (2, 3), (1, 2), torch.float64), memory.common(64, 6, torch.float64)
    del memory
    common.copy_(torch.arange(6))
    assert own.tolist() == [[0, 2, 4], [1, 3, 5]]
    assert own.untyped_storage().nbytes() == 48


def test_nothing_stays_open():
    count = lambda: len(os.listdir("/proc/self/fd"))  # noqa: E731
    before = count()
    for _ in range(20):
        memory = HostMemory.create(PAGE)
        words(memory)[0].fill_(1)
    del memory
    assert count() == before
