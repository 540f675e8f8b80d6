"""MSCCL's XML: 16 all-reduces come in, are proved, run and go out again as the same value; nonsense and bombs are refused."""

import re
from fractions import Fraction
from functools import partial

import pytest
import torch
from tests.fuzz.harness import calm
from tests.schedule import oracle
from tests.schedule.msccl_programs import all_pairs, programs, ring

import phalanx
from phalanx.cli.main import main
from phalanx.schedule import (
    Move,
    Schedule,
    ScheduleError,
    Step,
    from_msccl,
    from_mscclpp,
    gossip,
    lower,
    sent,
    swing,
    to_msccl,
    to_mscclpp,
    verify,
)

XML = programs()


@pytest.mark.parametrize("name", XML)
def test_examples_come_in_and_go_out_as_the_same_value(name):
    s = from_msccl(XML[name])
    verify(s)
    assert oracle.sums_everything(s)
    assert from_msccl(to_msccl(s)) == s


@pytest.mark.parametrize("name", XML)
@pytest.mark.filterwarnings("ignore:run. allreduce_1step")  # its ranks add in different orders
def test_examples_run_with_exact_sums(name):
    s = from_msccl(XML[name])

    def play(comm):
        x = torch.arange(1009) * (comm.rank + 1)
        return torch.equal(comm.run(s, x), torch.arange(1009) * (s.world * (s.world + 1) // 2))

    assert all(phalanx.run_local(s.world, play, timeout=30))


def test_steps_and_traffic_are_those_of_the_algorithm():
    assert len(from_msccl(XML["ring, fused"]).steps) == 14
    assert sent(from_msccl(XML["ring, fused"])) == sent(phalanx.ring(8))
    assert len(from_msccl(XML["all pairs"]).steps) == 2  # scratch and local sums became messages that add
    assert len(from_msccl(XML["one step"]).steps) == 1
    with pytest.raises(ScheduleError, match="do not end with equal bits"):
        verify(from_msccl(XML["one step"]), bitwise=True)


@pytest.mark.parametrize(
    "s", [phalanx.ring(5), phalanx.torus(2, 3), phalanx.tree(6), phalanx.halving_doubling(6), swing(8)], ids=lambda s: s.name
)
def test_schedules_of_ours_go_out_and_come_back(s):
    again = from_msccl(to_msccl(s))
    verify(again, bitwise=True)
    assert (again.name, again.world, again.chunks) == (s.name, s.world, s.chunks)
    assert sent(again) == sent(s)
    assert len(again.steps) <= len(lower(s).steps)
    assert from_msccl(to_msccl(again)) == again


def test_an_algorithm_that_is_not_in_place():
    """The sums go to the output buffer: received ones are written there, and sent from there."""

    def moved(rank, found):
        line = found.group()
        kind, chunk = re.search(r'type="(\w+)"', line).group(1), int(re.search(r'srcoff="(\d+)"', line).group(1))
        line = line.replace('dstbuf="i"', 'dstbuf="o"') if kind in ("r", "rcs", "rrc", "rrcs") else line
        mine = chunk == (rank - 1) % 5  # the chunk that a rank sends first is its input
        return line.replace('srcbuf="i"', 'srcbuf="o"') if kind == "s" and not mine else line

    inside = XML["ring, fused, sums not kept"]
    head, *gpus = inside.replace('inplace="1"', 'inplace="0"').split("<gpu ")
    gpus = [re.sub(r"<step .*", partial(moved, rank), part) for rank, part in enumerate(gpus)]
    outside = "<gpu ".join([head, *gpus])
    assert outside.count('buf="o"') > 20
    assert from_msccl(outside) == from_msccl(inside)
    late = outside.replace('type="s" srcbuf="o"', 'type="s" srcbuf="i"', 1)  # the input, after its place holds a sum
    with pytest.raises(ScheduleError, match="reads the old value of chunk"):
        from_msccl(late)


def test_a_mutant_is_read_and_refused_by_the_proof():
    with pytest.raises(ScheduleError, match="wanted x0"):
        verify(from_msccl(XML["ring"].replace('type="rrc"', 'type="r"', 1)))


@pytest.mark.parametrize(
    ("xml", "message"),
    [
        ("", "not XML"),
        ("<algo", "not XML"),
        ("hello", "not XML"),
        ('<!DOCTYPE a [<!ENTITY x "y">]><algo name="&x;"/>', "a document type"),
        ('<algo nchunksperloop="1" coll="allreduce"/>', "the algorithm has no <gpu>"),
        ('<algo nchunksperloop="1" coll="allreduce" ngpus="2"/>', "the algorithm has no <gpu>"),
        ("<gpu/>", "<gpu> where <algo> was expected"),
        (XML["ring"].replace("allreduce\"", "alltoall\""), "only allreduce is read"),
        (XML["ring"].replace('type="s"', 'type="put"', 1), "type 'put' is none of"),
        (XML["ring"].replace('cnt="1"', 'cnt="one"', 1), "cnt='one' is not a whole number"),
        (XML["ring"].replace('cnt="1"', 'cnt="99999999999999999999"', 1), "is not a whole number"),
        (XML["ring"].replace('<gpu id="1"', '<gpu id="0"'), "gpu 0 appears twice"),
        (XML["ring"].replace('ngpus="4"', 'ngpus="5"'), "wanted 0 to ngpus - 1"),
        (XML["ring"].replace('nchunksperloop="4"', 'nchunksperloop="2"'), "is not one of 2"),
        (XML["ring"].replace('send="1"', 'send="2"', 1), "deadlocks|never receives|receives"),
        (XML["ring"].replace('<step s="1"', '<step s="7"', 1), "step 7 where 1 was expected"),
        (XML["all pairs"].replace('dstbuf="s"', 'dstbuf="x"', 1), "dstbuf 'x' is none of i, o, s"),
        (XML["all pairs"].replace('srcbuf="s" srcoff="0"', 'srcbuf="s" srcoff="99"', 1), "which has not been written"),
    ],
)  # fmt: skip
def test_nonsense_is_refused_with_the_place(xml, message):
    with pytest.raises(ScheduleError, match=message):
        from_msccl(xml)


def test_what_needs_scratch_is_refused():
    program = all_pairs(2)
    program.copy(0, ("i", 0), 1, ("s", 2), 1)  # kept in scratch while its owner changes it, and added only then
    program.copy(1, ("i", 0), 0, ("i", 0), 1)
    program.copy(0, ("i", 0), 1, ("i", 0), 1)
    program.add(1, ("s", 2), ("i", 0))
    with pytest.raises(ScheduleError, match=r"has no scratch to keep it|which a schedule cannot"):
        from_msccl(program.xml())


def test_what_msccl_cannot_say_is_refused():
    with pytest.raises(ScheduleError, match="computes a mixing"):
        to_msccl(gossip(4, 0))
    with pytest.raises(ScheduleError, match="computes a copy"):
        to_msccl(phalanx.schedule.binomial(4))


@pytest.mark.parametrize("write", [to_msccl, to_mscclpp])
def test_a_factor_is_not_lost_on_the_way(write):
    halves = [Step((Move(0, 1, range(1), True, Fraction(1, 2)),))] * 2
    s = Schedule("halves", 2, 1, (*halves, Step((Move(1, 0, range(1)),))))
    verify(s)
    with pytest.raises(ScheduleError, match="halves scales or encodes, which MSCCL"):
        write(s)


def test_a_chunk_that_is_added_twice_is_refused():
    twice = Schedule("twice", 2, 1, (*[Step((Move(0, 1, range(1), True),))] * 2, Step((Move(1, 0, range(1)),))))
    for again in (lambda: from_msccl(to_msccl(twice)), lambda: from_mscclpp(to_mscclpp(twice))):
        with pytest.raises(ScheduleError, match="twice: gpu 1 adds chunk 0 of gpu 0 twice"):
            again()


def test_the_chunks_of_all_steps_are_limited():
    """800 bytes that mean millions of chunks: 13 s for half a million, and 230 bytes of memory for each."""
    most = 1 << 20
    step = f'<step s="%d" type="%s" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="{most}"/>'
    parts = {kind: "".join(step % (k, kind) for k in range(4)) for kind in ("s", "rrc")}
    xml = (
        f'<algo name="x" nchunksperloop="{most}" ngpus="2" coll="allreduce">'
        f'<gpu id="0"><tb id="0" send="1" recv="-1" chan="0">{parts["s"]}</tb></gpu>'
        f'<gpu id="1"><tb id="0" send="-1" recv="0" chan="0">{parts["rrc"]}</tb></gpu></algo>'
    )
    with calm(), pytest.raises(ScheduleError, match="line 1: more than 4,194,304 chunks in all steps together"):
        from_msccl(xml)


def test_a_name_cannot_leave_its_attribute():
    s = Schedule('"><evil/>', 2, 1, (Step((Move(0, 1, range(1), reduce=True), Move(1, 0, range(1), reduce=True))),))
    assert "<evil" not in to_msccl(s)
    assert from_msccl(to_msccl(s)) == s


def test_the_command_line_reads_and_writes_it(tmp_path, capsys):
    path = tmp_path / "ring.xml"
    path.write_text(ring(4).fuse().xml())
    assert main(["verify", str(path)]) == 0
    assert "allreduce_ring: 4 ranks, goal sum" in capsys.readouterr().out
    assert main(["show", str(path), "--msccl"]) == 0
    assert from_msccl(capsys.readouterr().out) == from_msccl(path.read_text())
    path.write_text("<algo>")
    assert main(["verify", str(path)]) == 1
    assert "not XML" in capsys.readouterr().err
