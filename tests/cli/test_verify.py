"""`phalanx verify`."""

import gc
import os
import resource
import subprocess
import sys

import pytest
from tests.cli.test_docs import CONSOLE, ELSEWHERE, without_seconds

from phalanx.cli.main import main
from phalanx.schedule import lower, ring, to_json, to_text, torus


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("ring:8", "ok  ring(8): 8 ranks, goal sum; 1 step, 1 op; lowered 14 steps, 112 ops; "),
        ("torus:4x8", "ok  torus(4x8): 32 ranks, goal sum; 3 steps, 16 ops; lowered 20 steps, 640 ops; "),
        ("torus:2x3x4", "ok  torus(2x3x4): 24 ranks, goal sum; 5 steps, "),
        ("hierarchical:4x8", "ok  hierarchical(4x8): 32 ranks, goal sum; 3 steps, 9 ops; lowered 20 steps, "),
        ("halving-doubling:16", "ok  halving_doubling(16): 16 ranks, goal sum; 8 steps, 128 ops; "),
        ("recursive-doubling:6", "ok  recursive_doubling(6): 6 ranks, goal sum; 4 steps, 12 ops; "),
        ("tree:16", "ok  tree(16): 16 ranks, goal sum; 15 steps, 480 ops; "),
        ("gossip:6", "ok  gossip(6, round=0, dissemination): 6 ranks, goal mixing; 2 steps, 7 ops; "),
        ("gossip-hypercube:6:2", "ok  gossip(6, round=2, hypercube): 6 ranks, goal mixing; 2 steps, 6 ops; "),
        ("binomial:9", "ok  binomial(9): 9 ranks, goal copy; 4 steps, 8 ops; "),
        ("scatter-gather:4", "ok  scatter_gather(4): 4 ranks, goal copy; 3 steps, "),
        ("ring:1", "ok  ring(1): 1 rank, goal sum; 0 steps, 0 ops; "),
    ],
)
def test_named_schedules_are_verified_in_one_line(name, line, capsys):
    assert main(["verify", name]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(line)
    assert out.endswith(" s\n")
    assert out.count("\n") == 1
    assert err == ""


def test_what_is_too_long_to_lower_is_said_to_be_unchecked(capsys):
    assert main(["verify", "ring:4096"]) == 0
    assert "1 step, 1 op; lowered 33,546,240 ops not checked (--all checks them); " in capsys.readouterr().out


@pytest.mark.parametrize("write", [to_text, to_json])
def test_files_are_verified_whatever_their_form(write, tmp_path, capsys):
    path = tmp_path / "mine"
    path.write_text(write(lower(torus(2, 3))))
    assert main(["verify", str(path)]) == 0
    assert capsys.readouterr().out.startswith("ok  torus(2x3): 6 ranks, goal sum; 6 steps, 36 ops; ")


def test_a_wrong_schedule_fails_with_the_facts(tmp_path, capsys):
    path = tmp_path / "mine.txt"
    text = to_text(lower(ring(2)))
    assert "  add 0 -> 1 [1]\n" in text
    path.write_text(text.replace("  add 0 -> 1 [1]\n", ""))
    assert main(["verify", str(path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "phalanx: ring(2): chunk 1 of rank 0 ends as x1, wanted x0 + x1 (step 2: Move(1 -> 0, 1))\n"


def test_chunks_that_do_not_divide_over_the_ranks_are_fine_but_not_for_parts_with_owners(tmp_path, capsys):
    path = tmp_path / "mine.txt"
    text = to_text(ring(3)).replace("chunks 3", "chunks 4").replace("[0:3]", "[0:4]")
    path.write_text(text)
    assert main(["verify", str(path)]) == 0
    assert "equal bits on all ranks" in capsys.readouterr().out
    path.write_text(text.replace("all_reduce", "reduce_scatter"))
    assert main(["verify", str(path)]) == 1
    assert "cannot be cut into 3 equal parts" in capsys.readouterr().err


def test_ranks_that_add_in_different_orders_are_named(tmp_path, capsys):
    path = tmp_path / "flood.txt"
    sends = "".join(f"  add {(dst + k) % 3} -> {dst} [0]\n" for dst in range(3) for k in (1, 2))
    path.write_text(f'schedule "flood"\nworld 3\nchunks 1\ngoal sum\nroot 0\nstep "all"\n{sends}')
    assert main(["verify", str(path)]) == 0
    assert "; but the ranks do not end with equal bits: chunk 0 is x2 + (x0 + x1) on rank 0 and" in capsys.readouterr().out


def test_a_malformed_file_fails_naming_file_and_line(tmp_path, capsys):
    path = tmp_path / "mine.txt"
    path.write_text("schedule ring\n")
    assert main(["verify", str(path)]) == 1
    assert capsys.readouterr().err == (f"phalanx: {path}: line 2: '' where 'world ...' was expected\n")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("star:8", "'star:8' is neither a schedule nor a file; the schedules are ring:N, torus:ROWSxCOLS"),
        ("ring", "'ring' is neither a schedule nor a file (write ring:N)"),
        ("ring:", "'ring:' does not have the form ring:N"),
        ("ring:4x4", "'ring:4x4' does not have the form ring:N"),
        ("hierarchical:8", "'hierarchical:8' does not have the form hierarchical:HOSTSxPER_HOST"),
        ("torus:4x-1", "'torus:4x-1' does not have the form torus:ROWSxCOLS"),
        ("torus:0x3", "torus:0x3: torus(0x3): axis 0 has size 0; give sizes >= 1"),
        ("torus:4000x8000", "torus:4000x8000: 32000000 ranks; the command line takes at most 65536"),
        ("gossip:70000:1", "gossip:70000:1: 70000 ranks; the command line takes at most 65536"),
        ("no/such/file", "'no/such/file' is neither a schedule nor a file"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(name, message, capsys):
    assert main(["verify", name]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"phalanx: {message}")
    assert err.count("\n") == 1


def test_a_file_that_is_not_text_is_wrong_usage(tmp_path, capsys):
    path = tmp_path / "mine.bin"
    path.write_bytes(b"\xff\xfe\x00")
    assert main(["verify", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_the_garbage_collector_is_left_as_it_was():
    assert gc.isenabled()
    main(["verify", "ring:4"])
    assert gc.isenabled()
    gc.disable()
    try:
        main(["verify", "ring:4"])
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_torus_of_4096_ranks_takes_seconds_with_the_start_of_the_process():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words, env = [sys.executable, "-m", "phalanx", *ELSEWHERE.split()], os.environ | {"COLUMNS": "100"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0
    assert "lowered 252 steps, 1,032,192 ops" in done.stdout
    assert without_seconds(done.stdout) == without_seconds(dict(CONSOLE)[ELSEWHERE])  # as the documentation has it
    # processor time: one thread, so the clock shows the same, but the neighbours of a busy machine do not count much.
    # 3.2 to 5.9 s on an AMD EPYC, whose speed changes from minute to minute
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 7
