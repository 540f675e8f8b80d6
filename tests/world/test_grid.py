"""The conformance grid (grid.py) on every transport: a part of it always, all of it with PHALANX_TEST_GRID=1, as CI does."""

from __future__ import annotations

import dataclasses
import importlib
import os
import pkgutil
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.long import often, times
from tests.world import grid, grid_verbs
from tests.world.conftest import Pools
from tests.world.grid import Cell, cells, huge, quick
from tests.world.grid_verbs import wrong_cells

import phalanx
import phalanx.comm
from phalanx.comm import run
from phalanx.comm.run import Form

WHOLE = os.environ.get("PHALANX_TEST_GRID") == "1"
WORLDS = (1, 2, 3, 4, 5) if WHOLE else (3,)
FEWER = times(1, seldom=2)
BATCH = 400  # cells of one job: each job has a deadline
TRANSPORTS = {
    "shared memory": {},
    "gloo": {"PHALANX_NATIVE": "0"},
    "collectives": {"PHALANX_FORM": "collectives"},
    "moves": {"PHALANX_FORM": "moves"},
}


STRIDES = {
    "gloo": 2,
    "collectives": 3,
    "moves": 7,
}  # of the part that always runs: without a native core gloo is the same as moves


def chosen(n: int) -> list[Cell]:
    return [*cells(n), *(huge(n) if n in (2, 3) else [])] if WHOLE else quick(n)[:: FEWER * (2 if n > 3 else 1)]


def batches(chosen: list[Cell]) -> list[list[Cell]]:
    return [chosen[i : i + BATCH] for i in range(0, len(chosen), BATCH)]


def check(wrong: list[list[str]], count: int, record) -> None:
    found = sorted(cell for of_a_rank in wrong for cell in of_a_rank)
    record("cells", count)
    record("wrong", len(found))
    print(f"{count} cells, {len(found)} wrong")
    assert not found, f"{len(found)} wrong results:\n" + "\n".join(found[:20])


@pytest.fixture(name="pools")
def pools_of_one_test(pools: Pools) -> Iterator[Pools]:
    """The whole grid ends its ranks after each test: they keep what they once needed, and 60 of them need more than 24 GiB."""
    if not WHOLE:
        yield pools
        return
    made = Pools()
    yield made
    made.kill()


# ---- the transports ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "hosts"), [(n, 1) for n in WORLDS] + ([(2, 2), (4, 2)] if WHOLE else [(4, 2)]))
def test_threads(ranks, hosts, record_property):
    part = chosen(ranks)
    check(phalanx.run_local(ranks, lambda comm: wrong_cells(comm, part), hosts=hosts), len(part), record_property)


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_processes(pools, transport, ranks, record_property):
    part = chosen(ranks) if WHOLE else quick(ranks)[:: FEWER * STRIDES.get(transport, 1)]
    pool = pools.of(ranks, **TRANSPORTS[transport])
    wrong = [pool.run(wrong_cells, batch, deadline=120) for batch in batches(part)]
    check([of_a_rank for answers in wrong for of_a_rank in answers], len(part), record_property)


def wrong_on_pretended_hosts(comm, part, per_host):
    """Several hosts of several ranks, each with shared memory, on one machine; the last may have fewer."""
    from phalanx.comm import create

    real = create.host_key
    create.host_key = lambda: f"host {comm.rank // per_host}"
    try:
        with phalanx.create_communicator(timeout=20) as spread:
            assert spread.inter_size == -(-comm.size // per_host)
            return wrong_cells(spread, part)
    finally:
        create.host_key = real


@pytest.mark.parametrize(("ranks", "per_host"), [(3, 2), (4, 2), (5, 2), (5, 3)] if WHOLE else [(4, 2), *often((3, 2))])
def test_hosts_of_several_ranks(pools, ranks, per_host, record_property):
    part = chosen(ranks) if WHOLE else quick(ranks)[:: FEWER * 4]
    pool = pools.of(ranks)
    wrong = [pool.run(wrong_on_pretended_hosts, batch, per_host, deadline=120) for batch in batches(part)]
    check([of_a_rank for answers in wrong for of_a_rank in answers], len(part), record_property)


def wrong_with_algorithms(comm, part):
    found = []
    n = comm.size
    rows = 2 if n % 2 == 0 else 1
    for algorithm in (phalanx.ring(n), phalanx.tree(n), phalanx.torus(rows, n // rows), phalanx.hierarchical(rows, n // rows)):
        with phalanx.create_communicator(algorithm, timeout=20) as chosen:
            found += [f"{algorithm.name}: {cell}" for cell in wrong_cells(chosen, part)]
    return found


@pytest.mark.skipif(not WHOLE, reason="PHALANX_TEST_GRID=1 runs the whole grid")
@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_algorithm_as_the_communicators_own(pools, transport, ranks, record_property):
    """Library calls exist only for the schedules that a communicator was made with."""
    part = [cell for cell in cells(ranks) if cell.verb in ("all_reduce", "reduce_scatter")]
    pool = pools.of(ranks, **TRANSPORTS[transport])
    check(pool.run(wrong_with_algorithms, part, deadline=120), 4 * len(part), record_property)


@pytest.mark.skipif(not WHOLE, reason="PHALANX_TEST_GRID=1 runs the whole grid")
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2")
@pytest.mark.parametrize(("hosts", "per_host"), [(2, 1), (2, 2)])
def test_network_namespaces(hosts, per_host, record_property):
    root = Path(__file__).parents[2]
    sys.path.insert(0, str(root / "benchmarks"))
    from lab import Lab

    part = cells(hosts * per_host)
    with Lab(hosts=hosts, ranks_per_host=per_host, rate="10gbit").up() as net:
        env = {"PYTHONPATH": f"{root / 'src'}:{root}"}
        outputs = net.run([sys.executable, str(root / "tests/world/programs/grid_rank.py")], deadline=170, env=env)
    check([output.splitlines() for output in outputs], len(part), record_property)


# ---- what is no size of a tensor --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [0, 1, 2] if WHOLE else [1])
def test_as_many_ranks_as_talk_at_a_time(more):
    ranks = grid.SPECIAL["phalanx.comm.peers.WINDOW"] + more
    part = [Cell(verb, "sum", "int64", 3, "WINDOW") for verb in (*grid.MESSAGES, "reduce_scatter", "all_reduce")]
    assert not any(phalanx.run_local(ranks, lambda comm: wrong_cells(comm, part)))


def wrong_with_small_limits(comm, part, limit):
    """Messages of at most `limit` bytes, and as little scratch kept: both limits are too large to be tried as they are."""
    from phalanx.comm import runner
    from phalanx.comm.transports.torch import transport

    whole, kept = transport.PIECE, runner.KEEP
    transport.PIECE = runner.KEEP = limit
    try:
        return wrong_cells(comm, part)
    finally:
        transport.PIECE, runner.KEEP = whole, kept


def test_messages_in_several_pieces(pools, record_property):
    limit = 3 << 10
    part = [
        Cell(verb, "sum", dtype, k * limit // width + more, "PIECE")
        for verb in grid.VERBS[:-1]
        for dtype, width in (("float32", 4), ("float64", 8))
        for k in (1, 2)
        for more in (-1, 0, 1)
        if verb != "all_reduce in a buffer"
    ]
    check(pools.of(3, PHALANX_NATIVE="0").run(wrong_with_small_limits, part, limit), len(part), record_property)


# ---- the grid itself --------------------------------------------------------------------------------------------------------


def test_every_threshold_is_in_the_grid():
    """A new constant, in Python or in C++, is a size of the grid, or somebody has written down why not."""
    found = set()
    for module in pkgutil.walk_packages(phalanx.comm.__path__, "phalanx.comm."):
        names = vars(importlib.import_module(module.name))
        source = Path(names["__file__"]).read_text()
        own = [name for name in names if name.isupper() and re.search(rf"^(?:\w+, )*{name}\b.*=", source, re.MULTILINE)]
        found |= {f"{module.name}.{name}" for name in own if type(names[name]) is int}
        for name in own:
            value = names[name]
            fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else ()
            found |= {f"{module.name}.{name}.{field.name}" for field in fields if type(getattr(value, field.name)) is int}
    if grid.native():
        from phalanx import _native

        found |= {f"phalanx._native.{name}" for name, value in vars(_native).items() if name.isupper() and type(value) is int}
    listed = grid.THRESHOLDS.keys() | grid.SPECIAL.keys() | grid.EXEMPT.keys()
    assert found <= listed, f"not in the grid: {sorted(found - listed)}"


def test_every_size_of_the_native_core_is_known_to_python():
    csrc = Path(__file__).parents[2] / "csrc"
    texts = "".join(path.read_text() for path in csrc.iterdir())
    found = set(re.findall(r"\b(\w+_bytes)\b\s*(?:=|\(int size\))", texts))
    visible = {"chunk_bytes", "small_bytes", "few_bytes", "third_bytes", "whole_bytes"}
    hidden = {
        "staging_bytes": "third_bytes() is made of it",
        "place_bytes": "of a text",
        "text_bytes": "of a text",
        "control_bytes": "of the control segment",
    }
    assert found == visible | hidden.keys()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_the_quick_part_visits_every_verb_op_dtype_and_threshold(ranks):
    for part in (quick(ranks), cells(ranks)):
        assert {cell.verb for cell in part} == set(grid.VERBS)
        kinds = {(cell.verb, cell.op, cell.dtype) for cell in part}
        for verb in grid.REDUCTIONS:
            assert {kind[1:] for kind in kinds if kind[0] == verb} == {
                (op, dtype) for op in grid.OPS for dtype in grid.DTYPES if op != "mean" or dtype in grid.FLOATS
            }
        for verb in ("all_reduce", "reduce_scatter", "bcast"):
            for why, places in grid.sizes(ranks).items():
                for nbytes in places:
                    near = [cell.nbytes - nbytes for cell in part if cell.verb == verb and cell.why == why]
                    # the last count that is not above it, the one before, the one behind; a count is of 1 to 8 bytes
                    at, behind = max(d for d in near if d <= 0), min((d for d in near if d > 0), default=9)
                    assert nbytes > 3 << 20 or (at > -8 and behind <= 8 and sum(-16 < d <= 8 for d in near) >= 3), (verb, why)


@pytest.mark.parametrize("verb", grid.VERBS[:-1])
def test_mutant_a_result_that_is_one_place_off_is_noticed(monkeypatch, verb):
    """The grid's own eyes: an oracle that is shifted by one element finds every verb wrong."""
    part = [Cell(verb, "sum", "float32", 1001, "mutant")]
    assert not any(phalanx.run_local(3, lambda comm: wrong_cells(comm, part)))
    monkeypatch.setattr(grid_verbs, "_equal", lambda x, wanted: torch.equal(x, wanted.roll(1)))
    assert any(phalanx.run_local(3, lambda comm: wrong_cells(comm, part)))


def test_mutant_pieces_that_are_scattered_by_themselves_are_noticed(monkeypatch):
    """What a reduce-scatter once did from 1 MiB on."""
    cut_alike = dataclasses.replace
    monkeypatch.setattr(Form, "cuts", lambda form, flat: cuts(cut_alike(form, placed=False, lanes=run.LANES), flat))
    part = [cell for cell in quick(2) if cell.verb in ("reduce_scatter", "run mixing")]
    found = phalanx.run_local(2, lambda comm: wrong_cells(comm, part))
    assert any("reduce_scatter" in cell for cell in found[0])
    long = ("LANE", "torus", "CHUNK", "whole_bytes", "third_bytes")  # sizes of more than one lane
    assert all(any(word in cell for word in long) for cell in found[0])


cuts = Form.cuts
