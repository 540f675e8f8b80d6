"""What saves bytes, priced: bytes are those of the schedules, steps obey bounds, and claims about accuracy have a source."""

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import phalanx
from phalanx.cluster import GBIT, MODELS, NCCL, SHARED_MEMORY, Cluster, ClusterError, Link, from_one
from phalanx.cluster.between_hosts import gossip_of, inside_hosts, leaving, on_hosts
from phalanx.cluster.evidence import EVIDENCE, evidence_of, keeps
from phalanx.cluster.pricing import domain_of, price_techniques, tensors_of_groups, thin
from phalanx.cluster.question import Question
from phalanx.cluster.step import make_groups
from phalanx.cluster.techniques import INT8, Priced, Technique, recommend, techniques
from phalanx.cluster.transformers import TRANSFORMERS
from phalanx.grad.wires.carrier import rows_of
from phalanx.grad.wires.low_rank import matrix_of
from phalanx.schedule import gossip, hierarchical, quantised, ring, sent, torus, verify

RESNET = MODELS["resnet50"]
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def question(hosts=4, per_host=2, rate=0.3 * GBIT, profile=SHARED_MEMORY, model=RESNET):
    cluster = Cluster("slow", hosts, per_host, inside=Link(1e-6, 2e10), network=Link(1e-4, rate))
    compute = from_one(RESNET, 2, 7.0)
    families = ("torus", "halving-doubling")
    return Question(cluster, model, compute, profile, 2.0 * cluster.ranks, group_sizes=(25e6,), families=families)


def by_name(rows):
    return {row.technique.name: row for row in rows}


@pytest.fixture(scope="module")
def slow():
    return by_name(price_techniques(question(), every=50))


# ---- bytes -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schedule",
    [
        ring(6),
        torus(3, 2),
        hierarchical(3, 2),
        quantised(3, 2),
        inside_hosts(question(3).cluster),
        gossip(6, 1),
        gossip(6, 2, "exact"),
    ],
    ids=lambda schedule: schedule.name,
)
def test_what_leaves_a_host_is_what_the_lowered_schedule_sends(schedule):
    by_rank = sent(schedule, lambda a, b: a // 2 != b // 2, code=phalanx.Int8().code.ratio)
    assert leaving(schedule, 2, INT8) == pytest.approx(max(float(a + b) for a, b in zip(by_rank[::2], by_rank[1::2])))


def test_the_code_is_that_of_int8():
    assert float(phalanx.Int8().code.ratio) == INT8


def test_bytes_of_a_step(slow):
    whole = slow["float32"].nbytes
    assert whole == pytest.approx(2 * 3 / 4 * 4 * RESNET.elements)
    assert slow["bfloat16"].nbytes == pytest.approx(whole / 2)
    assert slow["Int8"].nbytes == pytest.approx(whole * INT8)
    assert slow["PowerSGD rank 4"].nbytes < 0.03 * whole
    assert slow["LocalSGD H=50"].nbytes <= whole / 45
    assert slow["DiLoCo H=50 bfloat16"].nbytes == pytest.approx(slow["DiLoCo H=50"].nbytes / 2)
    assert slow["DiLoCo H=50 Int8"].nbytes == pytest.approx(whole * INT8 / 50)


def test_shapes_are_those_of_the_real_network():
    with torch.device("meta"):
        params = list(phalanx.models.resnet50().parameters())
    shapes = [(p.numel(), rows_of(p)) for p in params]
    assert sorted(shapes) == sorted((tensor.elements, tensor.rows) for tensor in RESNET.tensors)
    matrices = [(p.numel(), matrix_of(range(p.numel()), rows_of(p), 4)) for p in params]
    made = thin(list(RESNET.tensors), 4)
    assert made.first == sum(m.rows * m.rank if m else count for count, m in matrices)
    assert made.second == sum(m.columns * m.rank for _, m in matrices if m)
    assert made.multiplied == sum(count for count, m in matrices if m)


@pytest.mark.parametrize("size", [1e6, 25e6, 1e9])
def test_tensors_of_groups_are_all_of_them(size):
    grouped = tensors_of_groups(RESNET, size)
    assert list(grouped) == list(make_groups(RESNET, size))
    assert [sum(tensor.elements for tensor in own) for own in grouped.values()] == [group.elements for group in grouped]
    assert [tensor for own in grouped.values() for tensor in own] == list(reversed(RESNET.tensors))


def test_transformers_have_matrices():
    gpt2 = TRANSFORMERS["gpt2"]
    assert thin(list(gpt2.tensors), 4).multiplied > 0.99 * gpt2.elements


@pytest.mark.parametrize("hosts", [2, 3, 4, 5])
@pytest.mark.parametrize("topology", ["dissemination", "exact"])
def test_gossip_of_hosts_mixes(hosts, topology):
    for number in range(3):
        verify(on_hosts(gossip(hosts, number, topology), 2))


# ---- steps -------------------------------------------------------------------------------------------------------------------


def test_no_step_is_faster_than_its_wire_or_its_computing(slow):
    asked = question()
    work = asked.compute.seconds(asked.per_rank)
    for row in slow.values():
        assert row.seconds >= work, row.technique.name
        assert row.efficiency == pytest.approx(work / row.seconds)
        if row.technique.family in ("all-reduce", "int8", "powersgd"):
            assert row.seconds >= row.nbytes / asked.cluster.network.bandwidth, row.technique.name


def test_the_slower_the_network_the_more_it_pays():
    gains = []
    for rate in (0.1, 1.0, 100.0):
        rows = by_name(price_techniques(question(rate=rate * GBIT), every=50))
        gains.append(rows["float32"].seconds / rows["Int8"].seconds)
    assert gains[0] > gains[1] > gains[2]
    assert gains[0] > 3
    assert gains[2] < 1.2


def test_local_steps_approach_computing_alone():
    rows = [by_name(price_techniques(question(), every=every))[f"LocalSGD H={every}"] for every in (5, 50, 500)]
    assert rows[0].seconds > rows[1].seconds > rows[2].seconds
    assert rows[2].efficiency > 0.8  # packing and the sum inside hosts remain


def test_parts_that_travel_beside_steps_cost_less(slow):
    assert slow["DiLoCo H=50 streamed"].seconds < slow["DiLoCo H=50"].seconds


def test_libraries_and_single_ranks_are_priced():
    for asked in (question(profile=NCCL), question(3, 1), question(5, 3)):
        assert all(row.seconds is not None for row in price_techniques(asked, every=20, ranks=(1, 2)))


def test_what_cannot_be_priced_says_why():
    shapeless = replace(RESNET, tensors=tuple(replace(tensor, rows=1) for tensor in RESNET.tensors))
    row = by_name(price_techniques(question(model=shapeless), every=20))["PowerSGD rank 4"]
    assert row.seconds is None
    assert "shapes" in row.how
    with pytest.raises(ClusterError, match="one host"):
        price_techniques(question(hosts=1), every=20)
    with pytest.raises(ClusterError, match="double buffering"):
        price_techniques(replace(question(), double_buffering=True), every=20)


def test_gossip_takes_hosts_as_one_where_they_have_several_ranks():
    assert "hosts" in gossip_of(question(4, 2).cluster, exact=True).name
    assert "hosts" not in gossip_of(question(4, 1).cluster, exact=True).name


# ---- accuracy ----------------------------------------------------------------------------------------------------------------


def rows_of_study(file):
    return [json.loads(line) for line in (RESULTS / file).read_text().splitlines()]


@pytest.mark.parametrize("one", [one for one in EVIDENCE if one.study], ids=lambda one: f"{one.kind}, {one.study.data}")
def test_numbers_are_those_of_our_studies(one):
    study = one.study

    def accuracy(file, variant, seed):
        (row,) = [
            row
            for row in rows_of_study(file)
            if (row["data"], row["epochs"], row["variant"], row["seed"]) == (study.data, study.epochs, variant, seed)
        ]
        return 100 * row["accuracy"]

    apart = [accuracy(study.file, study.variant, seed) - accuracy(study.reference, "all-reduce", seed) for seed in study.seeds]
    assert one.points == pytest.approx(statistics.mean(apart), abs=0.011)


def test_every_technique_has_evidence_or_none_and_every_evidence_a_technique():
    kinds = {technique.kind for technique in techniques(20, (4,))}
    assert {one.kind for one in EVIDENCE} <= kinds
    assert all(one.points is not None or one.says for one in EVIDENCE)


def test_the_worst_comparison_decides():
    assert keeps("gossip", "images", 2.0) is True
    assert keeps("gossip", "images", 0.5) is False
    assert keeps("gossip", "text", 2.0) is None  # measured on images
    assert keeps("diloco", "text", 0.0) is True
    assert keeps("float32", None, 0.0) is True
    assert evidence_of("local-sgd") == ()


def test_a_variant_that_was_measured_less_is_not_judged_better():
    settings = {(one.study.data, one.study.epochs) for one in EVIDENCE if one.kind == "gossip"}
    known = evidence_of("gossip-exact", "images")
    assert {(one.study.data, one.study.epochs) for one in known} == settings
    (own,) = [one for one in known if one.kind == "gossip-exact"]
    assert all((one.study.data, one.study.epochs) != (own.study.data, own.study.epochs) for one in known if one is not own)
    assert keeps("gossip-exact", "images", 0.5) is keeps("gossip", "images", 0.5) is False
    assert own.text().startswith("gossip, exact: -0.49 points")


def priced(name, kind, seconds):
    return Priced(Technique(name, name, kind, "all-reduce"), 1.0, seconds, 1.0, "")


def test_the_recommendation_is_the_fastest_with_evidence():
    reference, sound, unknown = priced("plain", "float32", 3.0), priced("a", "int8", 2.0), priced("b", "local-sgd", 1.0)
    advice = recommend([reference, sound, unknown], "images", 0.5)
    assert advice.best is sound
    assert advice.faster == (unknown,)
    assert advice.rests_on == evidence_of("int8", "images")
    assert recommend([reference, sound, unknown], "text", 0.5).best is reference
    equal = replace(reference, seconds=2.01)
    assert recommend([equal, sound], "images", 0.5).best is equal  # what changes training less
    assert recommend([reference, replace(sound, seconds=None)], "images", 0.5).best is reference


def test_domains():
    assert domain_of(RESNET) == "images"
    assert domain_of(TRANSFORMERS["gpt2"]) == "text"
    assert domain_of(replace(RESNET, name="mine")) is None
