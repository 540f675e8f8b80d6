"""Clusters as values and as files, and what a library makes of their links."""

import numpy as np
import pytest

from phalanx.cluster import (
    GLOO,
    NCCL,
    NCCL_WITHOUT_TREES,
    PRESETS,
    PROFILES,
    SHARED_MEMORY,
    Cluster,
    ClusterError,
    Link,
    simulate,
)
from phalanx.cluster import machine as cluster_model
from phalanx.cluster import profile_file as backend_profile
from phalanx.cluster.machine import from_json, to_json
from phalanx.schedule import ring, torus


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_their_file_and_name_their_sources(name):
    cluster = PRESETS[name]
    again = from_json(to_json(cluster))
    assert again.sources == cluster.sources
    assert (again.hosts, again.per_host, again.ports, again.shared) == (
        cluster.hosts,
        cluster.per_host,
        cluster.ports,
        cluster.shared,
    )
    for one, other in ((again.network, cluster.network), (again.inside, cluster.inside)):
        assert (one.latency, one.bandwidth) == pytest.approx((other.latency, other.bandwidth))
    assert cluster.sources


def test_a_cluster_grows_and_shrinks_by_hosts():
    assert (PRESETS["dgx-1"].with_ranks(1024).hosts, PRESETS["dgx-1"].with_ranks(1024).ports) == (128, 4)
    small = PRESETS["dgx-1"].with_ranks(2)
    assert (small.hosts, small.per_host, small.ports) == (1, 2, 1)
    with pytest.raises(ClusterError, match="multiple of 8"):
        PRESETS["dgx-1"].with_ranks(12)


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("{", "JSON"),
        ("[]", "one JSON object"),
        ('{"hosts": 2}', "no object 'inside'"),
        (to_json(PRESETS["lab"]).replace('"hosts": 4', '"hosts": "4"'), "hosts is '4'"),
        (to_json(PRESETS["lab"]).replace('"hosts": 4', '"hosts": 0'), "at least 1"),
        (to_json(PRESETS["lab"]).replace('"ports"', '"prots"'), "'prots' is unknown"),
        (to_json(PRESETS["lab"]).replace('"host"', '"nobody"'), "'pair', 'rank' or 'host'"),
        (to_json(PRESETS["lab"]).replace('"gigabytes_per_s": 44.0', '"gigabytes_per_s": NaN'), "NaN is not a JSON number"),
        (to_json(PRESETS["lab"]).replace('"gigabytes_per_s": 44.0', '"gigabytes_per_s": 0'), "bandwidth > 0"),
        (to_json(PRESETS["lab"]).replace('"hosts": 4', '"hosts": 2147483648'), "at most 65536 ranks"),
        (to_json(PRESETS["lab"]).replace('"hosts": 4', '"hosts": ' + "[" * 100_000), "nested too deeply"),
        (to_json(PRESETS["lab"]).replace('"hosts": 4', '"hosts": 1' + "0" * 400), "give a number of at most 1e"),
        (to_json(PRESETS["lab"]).replace('"sources": {', '"sources": [], "others": {'), "no object 'sources'"),
        (to_json(PRESETS["mn-1"]).replace('"uplink": {', '"uplink": {"prots": 1, '), "'prots' is unknown"),
    ],
)
def test_a_wrong_file_is_refused_with_the_reason(text, fact):
    with pytest.raises(ClusterError, match=fact):
        from_json(text)


@pytest.mark.parametrize("name", PROFILES)
def test_profiles_survive_their_file(name):
    assert backend_profile.from_json(backend_profile.to_json(PROFILES[name])) == PROFILES[name]


def test_a_file_that_is_no_profile_is_refused():
    with pytest.raises(ValueError, match="not a backend profile"):
        backend_profile.from_json(cluster_model.to_json(PRESETS["lab"]))


def test_trees_win_where_there_are_many_hosts_and_few_bytes():
    many = PRESETS["dgx-1"].with_ranks(1024)
    with_trees, without = (simulate(ring(1024), many, 1e5, profile=p).seconds for p in (NCCL, NCCL_WITHOUT_TREES))
    assert with_trees < without / 2


def test_large_messages_reach_the_bandwidth_that_the_profile_promises():
    cluster = PRESETS["dgx-a100"].with_ranks(16)
    size = 8e9
    seconds = simulate(ring(16), cluster, size, profile=NCCL).seconds
    slowest = min(8 * cluster.network.bandwidth * NCCL.network, cluster.inside.bandwidth * NCCL.inside)
    assert seconds == pytest.approx(2 * 15 / 16 * size / slowest, rel=0.01)


def test_columns_of_a_torus_share_the_ports_of_their_hosts():
    eight, four = (
        simulate(torus(16, 8), Cluster("x", 16, 8, Link(0, 1e15), Link(0, 1e9), ports=ports), 1e9, profile=NCCL).seconds
        for ports in (8, 4)
    )
    assert four == pytest.approx(2 * eight, rel=0.01)


def test_shared_memory_is_cheaper_than_messages_through_the_kernel():
    lab = PRESETS["lab"].with_ranks(2)
    assert simulate(ring(2), lab, 1e6, profile=SHARED_MEMORY).seconds < simulate(ring(2), lab, 1e6, profile=GLOO).seconds
    assert np.isfinite(simulate(ring(2), lab, 1e6, profile=SHARED_MEMORY).seconds)
