"""MSCCL++'s plans: ours go out and come back as the same value, all its operations are read, races and nonsense are refused."""

import json
from copy import deepcopy

import pytest
import torch
from tests.schedule import oracle

import phalanx
from phalanx.cli.main import main
from phalanx.schedule import (
    ScheduleError,
    from_mscclpp,
    gossip,
    lower,
    quantised,
    recursive_doubling,
    sent,
    swing,
    to_mscclpp,
    verify,
)

OURS = [
    phalanx.ring(1), phalanx.ring(2), phalanx.ring(5), phalanx.torus(2, 3), phalanx.tree(6), phalanx.halving_doubling(6),
    swing(8), recursive_doubling(8), phalanx.hierarchical(2, 4),
]  # fmt: skip


@pytest.mark.parametrize("s", OURS, ids=lambda s: s.name)
def test_schedules_of_ours_go_out_and_come_back(s):
    again = from_mscclpp(to_mscclpp(s))
    verify(again, bitwise=True)
    assert oracle.sums_everything(again)
    assert (again.name, again.world, again.chunks) == (s.name, s.world, s.chunks)
    assert sent(again) == sent(s)
    assert len(again.steps) <= len(lower(s).steps)
    assert from_mscclpp(to_mscclpp(again)) == again


def local(buffer, index, size=1):
    return {"type": buffer, "index": index, "size": size}


def remote(number, index, size=1):
    return {"buffer_id": number, "index": index, "size": size}


def op(name, *, src=(), dst=(), channels=None, **more):
    found = {"name": name, "src_buff": list(src), "dst_buff": list(dst), "channel_type": "memory", **more}
    return found if channels is None else found | {"channel_ids": channels}


def plan(ops, *, world=2, chunks=2, scratch=4, blocks=1, **more):
    """A plan whose GPUs have a channel per thread block to every other one, and see input (even) and scratch (odd) of all."""
    gpus = []
    for rank in range(world):
        peers = [peer for peer in range(world) if peer != rank]
        channels = [peer for _ in range(blocks) for peer in peers]
        seen = [{"rank": peer, "type": kind, "access_channel_types": ["memory"]} for peer in peers for kind in "is"]
        threads = [
            {
                "id": block,
                "ops": ops(rank, block),
                "channels": [
                    {"channel_type": "memory", "channel_ids": list(range(block * len(peers), (block + 1) * len(peers)))}
                ],
                "remote_buffer_refs": [{"access_channel_type": "memory", "remote_buffer_ids": list(range(len(seen)))}],
            }
            for block in range(blocks)
        ]
        gpus.append(
            {
                "id": rank, "input_chunks": chunks, "output_chunks": chunks, "scratch_chunks": scratch, "threadblocks": threads,
                "channels": [{"channel_type": "memory", "connected_to": channels}], "remote_buffers": seen,
                "semaphores": [{"init_value": 0}],
            }
        )  # fmt: skip
    return {"name": "mine", "collective": "allreduce", "protocol": "Simple", "inplace": True, "gpus": gpus} | more


def zero_copy(rank, block):
    """Each of two GPUs reads the other's half, adds it to its own and writes the sum back: MSCCL++'s first example."""
    return [
        op("rlxsignal", channels=[0]), op("rlxwait", channels=[0]), {"name": "nop"},
        op("rres", src=[local("i", rank), remote(0, rank)], dst=[local("i", rank), remote(0, rank)], reduce_op="sum"),
        {"name": "nop"}, op("signal", channels=[0]), op("wait", channels=[0]),
    ]  # fmt: skip


def test_reads_of_remote_memory_become_messages():
    s = from_mscclpp(json.dumps(plan(zero_copy)))
    verify(s, bitwise=True)
    assert len(s.steps) == 2
    assert all(phalanx.run_local(2, lambda comm: torch.equal(comm.run(s, torch.ones(7)), torch.full((7,), 2.0)), timeout=30))


def through_scratch(rank, block):
    """The same with get, copy, re, res, a put that signals, flush, a semaphore and a barrier between two thread blocks."""
    mine, other = rank, 1 - rank
    if block == 1:
        return [
            op("get", src=[remote(0, mine)], dst=[local("s", 0)]), op("sem_release", semaphore_ids=[0]),
            op("barrier", barrier_id=3, num_threadblocks=2),
        ]  # fmt: skip
    return [
        op("sem_acquire", semaphore_ids=[0]), op("copy", src=[local("s", 0)], dst=[local("s", 1)]),
        op("re", src=[local("i", mine), local("s", 1)], dst=[local("i", mine)]),
        op("signal", channels=[0]), op("wait", channels=[0]), op("barrier", barrier_id=3, num_threadblocks=2),
        op("pws", src=[local("i", mine)], dst=[remote(0, mine)], channels=[0]),
        op("flush", channels=[0]), op("wait", channels=[0]), op("nop"), op("copy", src=[local("i", other)], dst=[local("s", 2)]),
    ]  # fmt: skip


def test_semaphores_barriers_and_scratch_are_followed():
    verify(from_mscclpp(json.dumps(plan(through_scratch, blocks=2))), bitwise=True)


def without(value, *names):
    """The plan without the last operation of each name, on every GPU and in the thread block that has it."""
    value = deepcopy(value)
    for gpu in value["gpus"]:
        for name in names:
            ops = next(block["ops"] for block in gpu["threadblocks"] if any(op["name"] == name for op in block["ops"]))
            del ops[max(i for i, op in enumerate(ops) if op["name"] == name)]
    return value


@pytest.mark.parametrize(
    ("value", "names", "message"),
    [
        (plan(through_scratch, blocks=2), ("sem_release", "sem_acquire"), "races|which has not been written"),
        (json.loads(to_mscclpp(phalanx.ring(2))), ("signal", "wait"), "races|which has not been written"),
    ],
    ids=["semaphore", "signal"],
)
def test_a_plan_that_forgets_to_wait_is_a_race(value, names, message):
    from_mscclpp(json.dumps(value))
    with pytest.raises(ScheduleError, match=message):
        from_mscclpp(json.dumps(without(value, *names)))


def test_a_put_without_its_signal_is_a_race():
    silent = json.loads(json.dumps(plan(through_scratch, blocks=2)).replace('"pws"', '"put"'))
    with pytest.raises(ScheduleError, match="operation 6: races with operation 9 of gpu"):
        from_mscclpp(json.dumps(without(silent, "wait")))


def test_a_mutant_is_read_and_refused_by_the_proof():
    value = json.loads(to_mscclpp(phalanx.ring(3)))
    one = next(op for block in value["gpus"][1]["threadblocks"] for op in block["ops"] if op["name"] == "re")
    one.update(name="copy", src_buff=one["src_buff"][1:])
    with pytest.raises(ScheduleError, match="wanted x0"):
        verify(from_mscclpp(json.dumps(value)))


GOOD = json.dumps(plan(zero_copy))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a plan"), ("[]", "the plan is"), ("{}", "collective None; only allreduce is read"),
        (GOOD[: GOOD.index('"gpus"')] + '"gpus": []}', "wanted the same"),
        (GOOD.replace("allreduce", "allgather"), "only allreduce is read"),
        (GOOD.replace("Simple", "LL"), "packets carry flags"),
        (GOOD.replace("input_chunks", "inputChunks"), "a plan of an older MSCCL"),
        (GOOD.replace('"rres"', '"ppkt"', 1), "gpu 0, thread block 0, operation 3: ppkt moves packets"),
        (GOOD.replace('"rres"', '"glres"', 1), "adds in the switch"),
        (GOOD.replace('"rres"', '"pipeline"', 1), "a pipeline cuts chunks"),
        (GOOD.replace('"rres"', '"leap"', 1), "no operation of MSCCL.. is called 'leap'"),
        (GOOD.replace('"rres"', '[]', 1), r"operation 3: no operation of MSCCL.. is called \[\]"),
        (GOOD.replace('"rres"', '{"a": []}', 1), "operation 3: no operation of MSCCL.. is called {'a'"),
        (GOOD.replace('"sum"', '"max"', 1), "a schedule sums"),
        (GOOD.replace('"buffer_id": 0', '"buffer_id": 9', 1), "remote buffer, of 2, is 9"),
        (GOOD.replace('"connected_to": [1]', '"connected_to": [7]', 1), "a peer of gpu 0 is 7"),
        (GOOD.replace('"index": 0', '"index": 5', 1), "index of gpu 0.s buffer i is 5"),
        (GOOD.replace('"rlxwait"', '"nop"', 1), "gpu 0 never waits for a signal of gpu 1"),
        (GOOD.replace('"rlxsignal"', '"nop"', 1), "deadlocks|never waits"),
        (GOOD.replace('"input_chunks": 2', '"input_chunks": 3', 1), "wanted the same on all"),
    ],
)  # fmt: skip
def test_nonsense_is_refused_with_the_place(text, message):
    with pytest.raises(ScheduleError, match=message):
        from_mscclpp(text)


@pytest.mark.parametrize(("s", "message"), [(gossip(4, 0), "computes a mixing"), (quantised(2, 2), "scales or encodes")])
def test_what_mscclpp_cannot_do_is_not_written(s, message):
    with pytest.raises(ScheduleError, match=message):
        to_mscclpp(s)


def test_the_command_line_reads_and_writes_plans(tmp_path, capsys):
    assert main(["show", "torus:2x2", "--mscclpp"]) == 0
    file = tmp_path / "plan.json"
    file.write_text(capsys.readouterr().out)
    assert main(["verify", str(file)]) == 0
    assert "ok  torus(2x2): 4 ranks, goal sum" in capsys.readouterr().out
