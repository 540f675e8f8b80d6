"""The bound with which hopeless algorithms are left out, against the simulator."""

import numpy as np
import pytest

from phalanx.cluster import MODELS, PRESETS, PROFILES, from_one, screen
from phalanx.cluster.candidates import algorithms
from phalanx.cluster.least import crowded, least_of
from phalanx.cluster.question import ALL_REDUCES, Question
from phalanx.cluster.simulate import run

MODEL = MODELS["resnet50"]
SIZES = np.array([0.0, 1e4, 1e6, 3e7, 2e8])


def question(name, backend, hosts=4):
    cluster = PRESETS[name].with_ranks(hosts * PRESETS[name].per_host)
    return Question(cluster, MODEL, from_one(MODEL, 408, 3293), PROFILES[backend], 32 * cluster.ranks, wires=(2,))


@pytest.mark.parametrize("backend", ["plain", "gloo", "shm+gloo"])
@pytest.mark.parametrize("name", ["abci", "cloud-25g", "dgx-a100", "lab"])
def test_no_schedule_is_faster_than_its_bound(name, backend):
    asked, queued = question(name, backend), 0
    for algorithm in algorithms(asked.cluster, ALL_REDUCES):
        (program,) = screen.programs_of(asked, algorithm)
        found = np.array([run(program, float(size)).seconds for size in SIZES])
        assert (least_of(program, SIZES) <= found * (1 + 1e-9)).all(), algorithm.name
        queued += crowded(program)
    assert queued or backend != "gloo"


@pytest.mark.parametrize(("name", "hosts"), [("cloud-25g", 8), ("abci", 16)])
def test_only_what_is_slower_at_every_size_is_left_out(name, hosts):
    asked, small = question(name, "gloo", hosts), SIZES[:3]
    tori = list(algorithms(asked.cluster, ("torus",)))
    made = [screen.programs_of(asked, algorithm) for algorithm in tori]
    priced, whole = (screen.price_family(tori, made, small, hopeless) for hopeless in (screen.HOPELESS, np.inf))
    left_out = [seconds for found, seconds in zip(priced, whole, strict=True) if found is None]
    kept = [found for found in priced if found is not None]
    assert left_out
    assert all(any((seconds > screen.HOPELESS * other).all() for other in kept) for seconds in left_out)
    assert all(found is None or (found == seconds).all() for found, seconds in zip(priced, whole, strict=True))
