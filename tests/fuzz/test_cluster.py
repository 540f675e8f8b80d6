"""The files of a plan: cluster, model, backend profile, rows to calibrate with, and the plan itself."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cluster.test_chakra_file import FORMS, as_json, as_protobuf
from tests.cluster.test_synth import IB, SMI, UNEQUAL
from tests.fuzz.harness import Parser, blocks, fuzz
from tests.fuzz.mutate import JSON, TEXT
from tests.long import times

from phalanx.cluster import MODELS, PRESETS, PROFILES, Cluster, Compute, Model, chakra_file, trace_file, workload_file
from phalanx.cluster import calibrate as calibration
from phalanx.cluster import machine as cluster_model
from phalanx.cluster import profile_file as backend_profile
from phalanx.cluster.fabric import FabricError, read_fabric
from phalanx.cluster.hosts_differ import typical_slowness
from phalanx.cluster.machine import ClusterError, Link, Uplink
from phalanx.cluster.synth import synthesise
from phalanx.cluster.workload import Tensor
from phalanx.train.config import ConfigError
from phalanx.train.planned import parse_plan

SMALL = Model("small", (Tensor("a", 10, 0.5, 0), Tensor("b", 3, 0.5, 0)), 1000)
DEVICE = Compute(1e-3, 1e-4, source="measured")
PLAN = {
    "hosts": 2,
    "per_host": 4,
    "batch": 64,
    "run": {"schedule": "torus:2x4", "sync": "all-reduce", "wire_bytes": 4, "group_bytes": 4e6},
    "step_s": 0.1,
    "terms_s": {"optimizer": 0.1},
}
GOSSIP = {**PLAN, "run": {"schedule": "gossip-hosts:2x4", "sync": "gossip", "wire_bytes": 2}}
ROWS = [
    {"contender": "phalanx ring(8)", "size": 4096, "time_us": 120.5},
    {"contender": "phalanx torus(4x2)", "size": 1 << 20, "time_us": 5000},
    {"contender": "torch", "size": 4096, "time_us": 100},
    {"config": {}},
]


def read_cluster(data):
    cluster = cluster_model.from_json(data.decode("utf-8", "replace"))
    again = cluster_model.from_json(cluster_model.to_json(cluster))
    assert (again.hosts, again.per_host, again.ports, again.name) == (
        cluster.hosts,
        cluster.per_host,
        cluster.ports,
        cluster.name,
    )
    assert len(typical_slowness(cluster, 0.01)) == cluster.ranks


def read_model(data):
    model, compute = workload_file.from_json(data.decode("utf-8", "replace"))
    assert all(math.isfinite(value) and value >= 0 for value in (compute.per_sample, compute.fixed, compute.optimizer))
    assert workload_file.from_json(workload_file.to_json(model, compute)) == (model, compute)
    assert math.isfinite(compute.seconds(32))


def read_chakra(data):
    model, compute = chakra_file.from_chakra(data, 32)
    assert math.isfinite(compute.seconds(32))
    assert all(tensor.elements > 0 for tensor in model.tensors)


def read_trace(data):
    model, compute = trace_file.from_trace(data.decode("utf-8", "replace"), 32)
    assert all(math.isfinite(value) and value >= 0 for value in (compute.per_sample, compute.forward, compute.optimizer))
    assert sum(tensor.work for tensor in model.tensors) == pytest.approx(1)


def _event(name, cat, ts, **args):
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": 1.0, "args": args}


TRACE = {
    "schemaVersion": 1,
    "traceEvents": [
        _event("aten::linear", "cpu_op", 10.0),
        _event("cudaLaunchKernel", "cuda_runtime", 11.0, correlation=1),
        _event("forward", "kernel", 50.0, correlation=1),
        _event("autograd::engine::evaluate_function: x", "cpu_op", 20.0),
        _event("cudaLaunchKernel", "cuda_runtime", 21.0, correlation=2),
        _event("back", "kernel", 60.0, correlation=2),
        _event("torch::autograd::AccumulateGrad", "cpu_op", 30.0, **{"Input Dims": [[3, 4]]}),
        _event("Optimizer.step#SGD.step", "user_annotation", 40.0),
    ],
}


def read_profile(data):
    profile = backend_profile.from_json(data.decode("utf-8", "replace"))
    assert backend_profile.from_json(backend_profile.to_json(profile)) == profile
    assert 1 <= profile.pieces(1e12) <= backend_profile.MAX_LANES


def read_plan(data):
    plan = parse_plan(data.decode("utf-8", "replace"), "plan.json")
    assert plan.ranks >= plan.hosts >= 1
    assert math.isfinite(plan.batch)


LSTOPO = sorted((Path(__file__).parents[1] / "cluster" / "lstopo").iterdir())


def read_network(data):
    fabric = read_fabric(data.decode("utf-8", "replace"))
    if fabric.ranks <= 6 and len(fabric.links) < 60:
        found = synthesise(fabric, trees=3)
        assert 0 <= found.bound <= found.seconds_per_byte * 1.000001


PARSERS = [
    Parser("fabric", read_network, (FabricError,), (UNEQUAL.encode(), SMI.encode(), IB.encode()), TEXT),
    Parser("lstopo", read_network, (FabricError,), tuple(file.read_bytes() for file in LSTOPO), TEXT),
    Parser(
        "cluster",
        read_cluster,
        (ClusterError,),
        tuple(cluster_model.to_json(PRESETS[name]).encode() for name in ("abci", "mn-1", "lab")),
        JSON,
    ),
    Parser(
        "model",
        read_model,
        (ValueError,),
        (workload_file.to_json(SMALL, DEVICE).encode(), workload_file.to_json(MODELS["vgg16"], Compute(1e-2)).encode()),
        JSON,
    ),
    Parser("Chakra JSON", read_chakra, (ValueError,), (as_json(),), TEXT),
    Parser("Chakra protobuf", read_chakra, (ValueError,), (as_protobuf(), FORMS["gzip"]), TEXT),
    Parser("trace", read_trace, (ValueError,), (json.dumps(TRACE).encode(),), JSON),
    Parser(
        "profile",
        read_profile,
        (ValueError,),
        tuple(backend_profile.to_json(PROFILES[name]).encode() for name in ("gloo", "nccl", "shm+gloo")),
        JSON,
    ),
    Parser("plan", read_plan, (ConfigError,), (json.dumps(PLAN).encode(), json.dumps(GOSSIP).encode()), JSON),
    Parser(
        "calibration rows",
        lambda data: calibration.read_rows(data.decode("utf-8", "replace").splitlines()),
        (ValueError,),
        ("\n".join(map(json.dumps, ROWS)).encode(),),
        (*TEXT, *JSON),
    ),
]


@pytest.mark.parametrize("cases", blocks())
@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_files_of_a_plan(parser, cases):
    assert set(fuzz(parser, cases)) == {"accepted", "refused"}


# ---- what is written reads back equal ------------------------------------------------------------------------------------------

positive = st.floats(1e-3, 1e3)
links = st.builds(Link, st.floats(0, 1e-3), st.floats(1e6, 1e12))


@settings(max_examples=times(100, seldom=40), deadline=None)
@given(
    st.builds(
        Cluster,
        st.text(max_size=10),
        st.integers(1, 256),
        st.integers(1, 256),
        links,
        links,
        st.integers(1, 16),
        st.sampled_from(["pair", "rank", "host"]),
        st.none() | st.builds(Uplink, st.integers(1, 64), st.floats(1e6, 1e12)),
    )
)
def test_a_cluster_reads_back_equal(cluster):
    again = cluster_model.from_json(cluster_model.to_json(cluster))
    for own, other in zip(asdict(cluster).values(), asdict(again).values()):
        if isinstance(own, dict):  # microseconds and gigabits are rounded
            assert own == pytest.approx(other)
        else:
            assert own == other


@settings(max_examples=times(100, seldom=40), deadline=None)
@given(
    st.lists(st.builds(Tensor, st.text(max_size=5), st.integers(1, 10**9), st.floats(0, 1), st.just(0)), min_size=1, max_size=5),
    st.builds(Compute, st.floats(1e-9, 10), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.text(max_size=5)),
)
def test_a_model_reads_back_equal(tensors, compute):
    model = Model("own", tuple(tensors), 10)
    if any(tensor.work for tensor in tensors):
        assert workload_file.from_json(workload_file.to_json(model, compute)) == (model, compute)


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_reads_back_equal(name):
    assert backend_profile.from_json(backend_profile.to_json(PROFILES[name])) == PROFILES[name]
