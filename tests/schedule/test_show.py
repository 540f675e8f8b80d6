"""Pictures: what a person sees, and what chrome://tracing loads."""

import json

import pytest

from phalanx.schedule import gossip, halving_doubling, hierarchical, lower, ring, show, torus, trace, tree

TORUS = """\
torus(2x3): 6 ranks, 6 chunks, 3 steps, goal: sum

       | 1 reduce-scatter     | 2 all-reduce | 3 all-gather along
       | along rows           | along        | rows
       |                      | columns      |
-------+----------------------+--------------+---------------------
rank 0 | RS 0-5 {0 1 2} → 0-1 | AR 0-1 {0 3} | 0-1 → AG 0-5 {0 1 2}
rank 1 | RS 0-5 {0 1 2} → 2-3 | AR 2-3 {1 4} | 2-3 → AG 0-5 {0 1 2}
rank 2 | RS 0-5 {0 1 2} → 4-5 | AR 4-5 {2 5} | 4-5 → AG 0-5 {0 1 2}
rank 3 | RS 0-5 {3 4 5} → 0-1 | AR 0-1 {0 3} | 0-1 → AG 0-5 {3 4 5}
rank 4 | RS 0-5 {3 4 5} → 2-3 | AR 2-3 {1 4} | 2-3 → AG 0-5 {3 4 5}
rank 5 | RS 0-5 {3 4 5} → 4-5 | AR 4-5 {2 5} | 4-5 → AG 0-5 {3 4 5}

RS 0-5 {0 1} → 0-2   reduce-scatter of chunks 0-5 by ranks 0 and 1; this rank keeps the sums of 0-2
AR 0-5 {0 1}         all-reduce of chunks 0-5 by ranks 0 and 1
0-2 → AG 0-5 {0 1}   all-gather of chunks 0-5 by ranks 0 and 1; this rank brings 0-2
"""

LOWERED = """\
torus(2x3): 6 ranks, 6 chunks, 6 steps, goal: sum

       | 1 reduce-    | 2 reduce-    | 3 all-reduce | 4 all-reduce
       | scatter      | scatter      | along        | along
       | along rows   | along rows   | columns 1/2  | columns 2/2
       | 1/2          | 2/2          |              |
-------+--------------+--------------+--------------+-------------
rank 0 | 4-5→1 +2-3←2 | 2-3→1 +0-1←2 | 1→3 +0←3     | 0→3 =1←3
rank 1 | 0-1→2 +4-5←0 | 4-5→2 +2-3←0 | 3→4 +2←4     | 2→4 =3←4
rank 2 | 2-3→0 +0-1←1 | 0-1→0 +4-5←1 | 5→5 +4←5     | 4→5 =5←5
rank 3 | 4-5→4 +2-3←5 | 2-3→4 +0-1←5 | 0→0 +1←0     | 1→0 =0←0
rank 4 | 0-1→5 +4-5←3 | 4-5→5 +2-3←3 | 2→1 +3←1     | 3→1 =2←1
rank 5 | 2-3→3 +0-1←4 | 0-1→3 +4-5←4 | 4→2 +5←2     | 5→2 =4←2

       | 5 all-gather | 6 all-gather
       | along rows   | along rows
       | 1/2          | 2/2
-------+--------------+-------------
rank 0 | 0-1→1 =4-5←2 | 4-5→1 =2-3←2
rank 1 | 2-3→2 =0-1←0 | 0-1→2 =4-5←0
rank 2 | 4-5→0 =2-3←1 | 2-3→0 =0-1←1
rank 3 | 0-1→4 =4-5←5 | 4-5→4 =2-3←5
rank 4 | 2-3→5 =0-1←3 | 0-1→5 =4-5←3
rank 5 | 4-5→3 =2-3←4 | 2-3→3 =0-1←4

4→1   sends chunk 4 to rank 1
+3←2  adds chunk 3 of rank 2 to its own
=3←2  takes chunk 3 of rank 2 for its own
"""


def test_torus_as_collectives():
    assert show(torus(2, 3)) == TORUS


def test_torus_as_moves_in_two_blocks_of_80_columns():
    assert show(lower(torus(2, 3)), width=80) == LOWERED


def test_blocks_are_no_wider_than_asked():
    for s in (lower(ring(8)), halving_doubling(13), lower(hierarchical(3, 4)), gossip(5, 1)):
        for width in (60, 80, 132):
            grid = show(s, width=width).split("\n\n")[1:-1]
            assert max(len(line) for block in grid for line in block.splitlines()) <= width


def test_every_step_is_shown_once_however_narrow():
    s = lower(ring(5))
    heads = [line for line in show(s, width=10).splitlines() if "all-reduce" in line]
    assert len(heads) == 8


def test_large_worlds_and_long_schedules_are_elided_in_a_stated_way():
    picture = show(lower(ring(40)), max_ranks=8, max_steps=4)
    assert picture.splitlines()[1] == "not shown: ranks 6-37, steps 4-77"
    rows = [line.split(" | ")[0].strip() for line in picture.splitlines() if line.startswith(("rank ", ".."))]
    assert rows == ["rank 0", "rank 1", "rank 2", "rank 3", "rank 4", "rank 5", "..", "rank 38", "rank 39"]
    assert "not shown" not in show(lower(ring(40)), max_ranks=40, max_steps=78)
    assert "{0 64 .. 4032}" in show(torus(64, 64))


def test_the_legend_explains_what_is_there_and_nothing_else():
    assert show(gossip(6, 2, "hypercube")).split("\n\n")[-1].splitlines() == [
        "4→1   sends chunk 4 to rank 1",
        "+3←2  adds chunk 3 of rank 2 to its own",
        "0*1/2 multiplies its chunk 0 by 1/2",
        ".     nothing to do",
    ]
    legend = show(hierarchical(2, 2)).split("\n\n")[-1]
    assert "reduce of chunks" in legend
    assert "broadcast of chunks" in legend
    assert "reduce-scatter of" not in legend


def test_a_world_of_one_has_nothing_to_show():
    assert show(ring(1)) == "ring(1): 1 rank, 1 chunk, 0 steps, goal: sum\n"


@pytest.mark.parametrize(
    "s", [torus(2, 3), lower(torus(2, 3)), tree(5), gossip(6, 2, "hypercube"), ring(1)], ids=lambda s: s.name
)
def test_trace_has_one_row_per_rank_and_one_bar_per_step_that_concerns_it(s):
    events = json.loads(trace(s))["traceEvents"]
    assert {e["tid"] for e in events if e["name"] == "thread_name"} == set(range(s.world))
    bars = [e for e in events if e["ph"] == "X"]
    assert len({(bar["tid"], bar["ts"]) for bar in bars}) == len(bars)
    assert {bar["dur"] for bar in bars} <= {1000}
    assert {bar["ts"] // 1000 for bar in bars} == set(range(len(s.steps)))
    assert {bar["name"] for bar in bars} == {step.label for step in s.steps}


def test_trace_says_what_a_rank_does():
    bars = [e for e in json.loads(trace(lower(torus(2, 3))))["traceEvents"] if e["ph"] == "X"]
    assert bars[0]["args"] == {"step": 1, "ops": ["Move(0 -> 1, 4-5, reduce)", "Move(2 -> 0, 2-3, reduce)"]}
