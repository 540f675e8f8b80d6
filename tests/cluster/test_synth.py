"""Synthesis: a proved all-reduce for any graph, close to a bound that is a bound; and the files that describe graphs."""

import random
import time
from itertools import combinations

import pytest
from tests.long import times

from phalanx.cli.main import main
from phalanx.cli.synth import by_hand
from phalanx.cluster.fabric import FabricError, from_ibnetdiscover, from_nvidia_smi, make_fabric, parse_fabric, read_fabric
from phalanx.cluster.synth import busiest_link, synthesise
from phalanx.schedule import from_text, verify


def both_ways(links):
    return [link for a, b, rate in links for link in ((a, b, rate), (b, a, rate))]


def ring_of(n):
    return make_fabric(f"ring of {n}", both_ways((i, (i + 1) % n, 10.0) for i in range(n)))


def torus_of(rows, cols):
    links = [(i * cols + j, i * cols + (j + 1) % cols, 10.0) for i in range(rows) for j in range(cols)]
    links += [(i * cols + j, (i + 1) % rows * cols + j, 10.0) for i in range(rows) for j in range(cols)]
    return make_fabric(f"torus {rows}x{cols}", both_ways(links))


def random_graph(n, seed):
    rng = random.Random(seed)
    tree = [(i, rng.randrange(i), rng.choice([5.0, 10.0, 20.0])) for i in range(1, n)]
    more = [(*rng.sample(range(n), 2), rng.choice([5.0, 10.0, 20.0])) for _ in range(2 * n)]
    return make_fabric(f"random {n}, {seed}", both_ways(tree + more))


UNEQUAL = 'fabric "unequal hosts"\n0-2 - a : 50\n3-7 - b : 50\na b - c : 10'
RAILS = "\n".join(
    f"{4 * h}-{4 * h + 3} - nv{h} : 100\n" + "\n".join(f"{4 * h + r} - rail{r} : 12.5" for r in range(4)) for h in range(3)
)
DGX1 = [
    (0, 1, 1), (0, 2, 1), (0, 3, 2), (0, 4, 2), (1, 2, 2), (1, 3, 1), (1, 5, 2), (2, 3, 2),
    (2, 6, 1), (3, 7, 1), (4, 5, 1), (4, 6, 1), (4, 7, 2), (5, 6, 2), (5, 7, 1), (6, 7, 2),
]  # fmt: skip
ISLANDS = "\n".join(f"{4 * h}-{4 * h + 3} - nv{h} : 100\nnv{h} - leaf{h // 2} : 25" for h in range(4))
FAT_TREE = f"{ISLANDS}\nleaf0 leaf1 - spine : 40"
GRAPHS = [
    ring_of(5), ring_of(8), torus_of(4, 4), torus_of(3, 5), parse_fabric("0-7 - s : 25"), parse_fabric(UNEQUAL),
    parse_fabric(RAILS), make_fabric("DGX-1", both_ways((a, b, 25.0 * k) for a, b, k in DGX1)), parse_fabric(FAT_TREE),
    random_graph(10, 1), random_graph(16, 2), parse_fabric("0-3 - s : 10\n4-7 -> s : 5\ns -> 4-7 : 10"),
]  # fmt: skip


@pytest.mark.parametrize("fabric", GRAPHS, ids=lambda f: f.name)
def test_within_5_percent_of_the_bound_and_never_below_it(fabric):
    found = synthesise(fabric)
    verify(found.schedule, bitwise=True)
    assert busiest_link(found.schedule, fabric) == pytest.approx(found.seconds_per_byte)
    assert found.bound * 0.999999 <= found.seconds_per_byte <= 1.05 * found.bound
    for s in by_hand(fabric.ranks):
        assert busiest_link(s, fabric) >= 0.999999 * found.bound, s.name


@pytest.mark.parametrize("seed", range(6))
def test_the_bound_is_that_of_the_worst_partition_of_a_small_graph(seed):
    """Tutte and Nash-Williams: with links between ranks alone, (parts - 1) / (what crosses) of the worst partition is exact."""
    fabric = random_graph(5, seed)
    rates = {}
    for a, b, rate in fabric.links:
        if a < b:
            rates[a, b] = rate * 1e9
    worst = max(
        (len(parts) - 1) / sum(rate for (a, b), rate in rates.items() if home[a] != home[b]) for parts, home in partitions(5)
    )
    found = synthesise(fabric)
    assert 0.95 * worst <= found.bound <= worst * 1.000001
    assert worst * 0.999999 <= found.seconds_per_byte <= 1.06 * worst


def partitions(n):
    def cut(rest):
        if not rest:
            yield []
            return
        first, others = rest[0], rest[1:]
        for size in range(len(others) + 1):
            for chosen in combinations(others, size):
                left = [x for x in others if x not in chosen]
                for more in cut(left):
                    yield [[first, *chosen], *more]

    for parts in cut(list(range(n))):
        if len(parts) > 1:
            yield parts, {x: i for i, part in enumerate(parts) for x in part}


def test_128_ranks_take_seconds():
    hosts = times(16, seldom=8)
    lines = (f"{8 * h}-{8 * h + 7} - nv{h} : 300\nnv{h} - core : {25 if h % 2 else 50}" for h in range(hosts))
    fabric = parse_fabric("\n".join(lines))
    start = time.process_time()
    found = synthesise(fabric)
    assert time.process_time() - start < 4  # 1.2 s on an idle core
    assert found.seconds_per_byte <= 1.05 * found.bound


def test_small_and_pipelined():
    assert synthesise(parse_fabric("0 - s : 1")).schedule.steps == ()
    two = synthesise(parse_fabric("0 - 1 : 8"))
    assert two.bound == pytest.approx(two.seconds_per_byte) == pytest.approx(1 / 8e9)
    piped = synthesise(ring_of(4), trees=4, pipeline=3).schedule
    verify(piped, bitwise=True)
    assert piped.chunks == 12


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no rank has a link"),
        ("hello", "line 1: 'hello' is not like"),
        ("0 - 1", "line 1"),
        ("0 - 1 : 0", "give more than 0"),
        ("0 - 1 : -3", "line 1|give more"),
        ("0 - 1 : nan", "line 1|give more"),
        ("0 - 1 : 1e99", "at most"),
        ("0 - 0 : 1", "linked to itself"),
        ("0 - 2 : 1", "rank 1 has no link, but rank 2 has"),
        ("0-99999 - s : 1", "range of at most"),
        ("0-4000 - 0-4000 : 1", "more than|itself"),
        ("fabric evil\n0 - 1 : 1", "line 1: 'evil' is not a text"),
    ],
)
def test_nonsense_is_refused_with_the_line(text, message):
    with pytest.raises(FabricError, match=message):
        parse_fabric(text)


def test_ranks_without_a_way_are_named():
    with pytest.raises(FabricError, match="no way from rank 0 to rank 2"):
        synthesise(parse_fabric("0 - 1 : 1\n2 - 3 : 1"))


SMI = """\
        GPU0    GPU1    GPU2    GPU3    NIC0    CPU Affinity    NUMA Affinity
GPU0     X      NV2     NV1     SYS     PIX     0-15            0
GPU1    NV2      X      SYS     NV1     PIX     0-15            0
GPU2    NV1     SYS      X      NV2     SYS     16-31           1
GPU3    SYS     NV1     NV2      X      SYS     16-31           1
NIC0    PIX     PIX     SYS     SYS      X
"""


def test_what_nvidia_smi_prints():
    fabric = read_fabric(SMI)
    assert fabric.ranks == 4
    assert (0, 1, 50.0) in fabric.links
    assert (0, "pcie", 8.0) in fabric.links
    verify(synthesise(fabric).schedule, bitwise=True)
    switched = from_nvidia_smi("GPU0 GPU1 GPU2\nGPU0 X NV18 NV18\nGPU1 NV18 X NV18\nGPU2 NV18 NV18 X\n")
    assert switched.links[0] == (0, "nvswitch", 450.0)
    for wrong in ("", "GPU0 X", SMI.replace("SYS", "???")):
        with pytest.raises(FabricError):
            from_nvidia_smi(wrong)


IB = """\
Switch  36 "S-0001"         # "leaf" base port 0 lid 1
[1]     "H-000a"[1](a)      # "node1 HCA-1" lid 2 4xHDR
[2]     "H-000b"[1](b)      # "node2 HCA-1" lid 3 4xHDR

Ca      1 "H-000a"          # "node1 HCA-1"
[1](a)  "S-0001"[1]         # lid 2 lmc 0 "leaf" lid 1 4xHDR

Ca      1 "H-000b"          # "node2 HCA-1"
[1](b)  "S-0001"[2]         # lid 3 lmc 0 "leaf" lid 1 4xHDR
"""


def test_what_ibnetdiscover_prints():
    fabric = read_fabric(IB)
    assert fabric.ranks == 2
    assert fabric.switches == ("S-0001",)
    assert set(fabric.links) == {("S-0001", 0, 25.0), ("S-0001", 1, 25.0), (0, "S-0001", 25.0), (1, "S-0001", 25.0)}
    with pytest.raises(FabricError):
        from_ibnetdiscover("nothing")


def test_the_command_line(tmp_path, capsys):
    path, out = tmp_path / "lab.fabric", tmp_path / "lab.txt"
    path.write_text(UNEQUAL)
    assert main(["synth", "--cluster", str(path), "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "unequal hosts: 8 ranks, 3 switches" in text
    assert "lower bound" in text
    assert "torus(2x4)" in text
    assert "proved, with equal bits on all ranks" in text
    verify(from_text(out.read_text()), bitwise=True)
    assert main(["verify", str(out)]) == 0
    assert main(["synth", "--cluster", str(tmp_path / "none")]) == 2
    path.write_text("0 - 1")
    assert main(["synth", "--cluster", str(path)]) == 2
    assert "line 1" in capsys.readouterr().err
