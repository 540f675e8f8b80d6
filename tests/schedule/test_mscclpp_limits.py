"""MSCCL++'s plans with large numbers: places outside a buffer, and small files that once took all memory or hours."""

import json

import pytest
from tests.fuzz.harness import calm
from tests.schedule.test_mscclpp import GOOD, local, op, plan, remote, zero_copy

from phalanx.schedule import ScheduleError, from_mscclpp, recursive_doubling, to_mscclpp, verify


def blocks_of(*blocks, semaphores=()):
    """A plan of one GPU with these thread blocks."""
    value = plan(lambda rank, block: blocks[block], world=1, blocks=len(blocks))
    value["gpus"][0]["semaphores"] = [{"init_value": value} for value in semaphores]
    return json.dumps(value)


def test_places_are_within_the_scratch_of_their_owner():
    value = json.loads(to_mscclpp(recursive_doubling(2)))
    far = op("put", src=[local("i", 0)], dst=[remote(0, 999_999)])
    value["gpus"][0]["threadblocks"][0]["ops"].insert(0, far)
    with pytest.raises(ScheduleError, match="operation 0: index of gpu 1's buffer s is 999999; give a whole number from 0 to 0"):
        from_mscclpp(json.dumps(value))
    far["dst_buff"] = [remote(0, 0, 2)]
    with pytest.raises(ScheduleError, match="size of gpu 1's buffer s from 0 is 2"):
        from_mscclpp(json.dumps(value))


def test_places_are_within_the_input_of_their_owner():
    far = GOOD.replace('"buffer_id": 0, "index": 0', '"buffer_id": 0, "index": 2', 1)
    with pytest.raises(ScheduleError, match="index of gpu 1's buffer i is 2; give a whole number from 0 to 1"):
        from_mscclpp(far)


def test_without_scratch_there_are_no_places_in_it():
    text = to_mscclpp(recursive_doubling(2)).replace('"scratch_chunks": 1', '"scratch_chunks": 0')
    with pytest.raises(ScheduleError, match="uses scratch of gpu 1, whose scratch_chunks are 0"):
        from_mscclpp(text)
    verify(from_mscclpp(json.dumps(plan(zero_copy, scratch=0))))  # which uses none


def test_initial_values_of_semaphores_take_no_memory():
    take = [op("sem_acquire", semaphore_ids=[0, 0])] * 2
    with calm(megabytes=64):
        from_mscclpp(blocks_of(take, semaphores=[1 << 20] * 20))
        from_mscclpp(blocks_of(take, semaphores=[4]))
    with pytest.raises(ScheduleError, match="operation 1: deadlocks"):
        from_mscclpp(blocks_of(take, semaphores=[3]))


def test_clocks_that_pass_a_barrier_are_limited():
    text = blocks_of(*[[op("barrier", barrier_id=0, num_threadblocks=4200)]] * 4200)
    with calm(), pytest.raises(ScheduleError, match="too many signals between too many thread blocks"):
        from_mscclpp(text)


def test_a_chain_of_thread_blocks_in_reverse_order_takes_one_pass():
    chain = [[op("sem_acquire", semaphore_ids=[k + 1]), op("sem_release", semaphore_ids=[k])] for k in range(2200)]
    with calm():
        from_mscclpp(blocks_of(*chain, [op("sem_release", semaphore_ids=[2200])], semaphores=[0] * 2201))


def test_thread_blocks_that_share_a_semaphore_get_one_release_each():
    takers, two = [[op("sem_acquire", semaphore_ids=[0])]] * 5, [op("sem_acquire", semaphore_ids=[0, 0])]
    for count in (6, 7, 8):
        text = blocks_of(*takers, two, [op("sem_release", semaphore_ids=[0])] * count, semaphores=[0])
        if count < 7:
            with pytest.raises(ScheduleError, match="deadlocks with all others"):
                from_mscclpp(text)
        else:
            from_mscclpp(text)


def test_a_barrier_holds_its_thread_blocks_until_all_are_there():
    meet = op("barrier", barrier_id=0, num_threadblocks=2)
    read, write = op("copy", src=[local("i", 0)], dst=[local("s", 0)]), op("copy", src=[local("i", 1)], dst=[local("s", 0)])
    from_mscclpp(blocks_of([read, meet], [meet, write]))
    from_mscclpp(blocks_of([meet, read, meet], [meet, meet, write]))
    with pytest.raises(ScheduleError, match="races with"):
        from_mscclpp(blocks_of([meet, read], [meet, write]))
    with pytest.raises(ScheduleError, match="gpu 0, thread block 2, operation 0: deadlocks"):
        from_mscclpp(blocks_of([meet], [meet], [meet]))
    with pytest.raises(ScheduleError, match="barrier 0 is for 3 thread blocks here, and for 2 in another"):
        from_mscclpp(blocks_of([meet], [meet | {"num_threadblocks": 3}]))
