"""MSCCL's three buffers: sums in scratch, algorithms that are not in place; and what the programs that run the XML demand."""

import re

import pytest
from tests.schedule import oracle

import phalanx
from phalanx.schedule import Move, Schedule, ScheduleError, Step, from_msccl, halving_doubling, to_msccl, verify


def file(*gpus, chunks=1, inplace=1):
    """XML of thread blocks `(send, recv, steps)` per gpu; a step is "kind source target", then maybe "after block.step"."""
    lines = [f'<algo name="mine" coll="allreduce" ngpus="{len(gpus)}" nchunksperloop="{chunks}" inplace="{inplace}" proto="LL">']
    for rank, blocks in enumerate(gpus):
        lines.append(f'<gpu id="{rank}">')
        for number, (send, recv, steps) in enumerate(blocks):
            lines.append(f'<tb id="{number}" send="{send}" recv="{recv}" chan="0">')
            for at, step in enumerate(steps):
                kind, a, b, *after = step.split()
                block, other = after[1].split(".") if after else (-1, -1)
                lines.append(
                    f'<step s="{at}" type="{kind}" srcbuf="{a[0]}" srcoff="{a[1:]}" dstbuf="{b[0]}" dstoff="{b[1:]}" cnt="1"'
                    f' depid="{block}" deps="{other}"/>'
                )
            lines.append("</tb>")
        lines.append("</gpu>")
    return "\n".join([*lines, "</algo>"])


EXCHANGE = Step((Move(0, 1, range(1), reduce=True), Move(1, 0, range(1), reduce=True)))


def sums(xml):
    s = from_msccl(xml)
    verify(s)
    assert oracle.sums_everything(s)
    assert from_msccl(to_msccl(s)) == s
    return s


def test_a_copy_to_the_output_leaves_the_input_readable():
    gpus = [[(-1, -1, ["cpy i0 o0", "re s0 o0 after 1.1"]), (peer, peer, ["s i0 s0 after 0.0", "r i0 s0"])] for peer in (1, 0)]
    assert sums(file(*gpus, inplace=0)) == Schedule("mine", 2, 1, (EXCHANGE,))


def test_a_received_sum_may_go_to_another_place():
    """The kernel reads the local source of rrc and rrcs, adds what came, and writes the target."""
    first = [(1, 1, ["r i0 s0", "s i0 i0 after 1.1"]), (2, 2, ["rrc s0 s1 after 0.0", "re s1 i0", "s i0 i0"])]
    other = [(0, 0, ["s i0 s0", "r i0 i0"])]
    assert len(sums(file(first, other, other)).steps) == 2


@pytest.mark.parametrize("steps", [["cpy i0 s0", "r i0 s1", "re s1 s0", "cpy s0 i0"], ["rrc i0 s0", "cpy s0 i0"]])
def test_a_sum_of_the_own_chunk_may_grow_in_scratch(steps):
    gpus = [[(peer, peer, ["s i0 s1", *steps])] for peer in (1, 0)]
    assert sums(file(*gpus)) == Schedule("mine", 2, 1, (EXCHANGE,))


def test_a_sum_that_is_only_sent_on_leaves_scratch_alone():
    gpus = [
        [(1, 2, ["s i0 s0", "r i0 i0"])],
        [(2, 0, ["cpy i0 s1", "rrs s1 s0", "cpy s1 i0"]), (-1, 2, ["r i0 i0 after 0.2"])],
        [(0, 1, ["rrc i0 i0", "s i0 i0"]), (1, -1, ["s i0 i0 after 0.0"])],
    ]
    into = Step((Move(0, 2, range(1), reduce=True), Move(1, 2, range(1), reduce=True)))
    back = Step((Move(2, 0, range(1)), Move(2, 1, range(1))))
    assert sums(file(*gpus)) == Schedule("mine", 3, 1, (into, back))


@pytest.mark.parametrize(
    ("gpus", "inplace", "message"),
    [
        ([[(1, 1, ["s i0 i0", "rrc i0 i0"])], [(0, 0, ["rrs i0 i0"])]], 1, "sends a sum of chunk 0 on and never stores it"),
        ([[(1, 1, ["s i0 i0", "rrc i0 i0"])], [(0, 0, ["s i0 i0", "rrc i0 i0"])]], 0, "0 of 2 chunks are in the output"),
        ([[(1, 1, ["s i0 s0", "r i0 s0", "re s0 o0"])], [(0, 0, ["s i0 s0", "r i0 s0", "re s0 o0"])]], 0, "reads the old value"),
    ],
)
def test_what_is_an_all_reduce_only_for_a_schedule_is_refused(gpus, inplace, message):
    with pytest.raises(ScheduleError, match=message):
        from_msccl(file(*gpus, inplace=inplace))


@pytest.mark.parametrize(
    ("gpu", "message"),
    [
        ([(1, 1, ["s i0 s0", "r i0 s0", *["re s0 s0"] * 64])], "the sums in scratch have more than"),
        ([(1, 1, ["s i0 s0", "r i0 s0"]), (1, -1, ["s i0 s0"])], "sends to gpu 1 on channel 0 in 2 thread blocks"),
        ([(1, 1, ["s i0 s0", "r i0 s0"]), (-1, 1, ["r i0 s0"])], "receives from gpu 1 on channel 0 in 2 thread blocks"),
    ],
)
def test_what_no_gpu_can_do_is_refused(gpu, message):
    with pytest.raises(ScheduleError, match=message):
        from_msccl(file(gpu, [(0, 0, ["s i0 s0", "r i0 s0"])]))


def test_the_export_has_what_the_executors_demand():
    """RCCL and Azure's executor refuse XML without the first three attributes, and all refuse 72 or more chunks in a step."""
    s = halving_doubling(256)
    xml = to_msccl(s)
    assert all(f" {name}=" in xml.splitlines()[0] for name in ("outofplace", "minBytes", "maxBytes"))
    assert max(int(n) for n in re.findall(r' cnt="(\d+)"', xml)) < 72
    again = from_msccl(xml)
    verify(again)
    assert phalanx.schedule.sent(again) == phalanx.schedule.sent(s)
