"""Every mistake in what orders streams and memory is caught by some scenario, within 200 seeds; most by the first."""

import pytest
from tests.simulated_cuda.mutants import mutants
from tests.simulated_cuda.scenarios import SCENARIOS
from tests.simulated_cuda.training import MODES
from tests.simulated_cuda.verbs import VERBS

SEEDS = 200

# Mutants that do the same as the product, and why.
SAME = {
    "swap self._context.__enter__() | self._stream.wait_event(self._before)": "both name their stream",
    "swap self._stream.wait_event(self._before) | for x in self._tensors": "record_stream enqueues nothing",
    "swap caller.wait_event(self._after) | for x in _tensors_in(result)": "record_stream enqueues nothing",
    "swap self._after = self._stream.record_event() | self._context.__exit__(kind, error, where)": "both name their stream",
}
ALL = mutants()

# where to look first; all the others come after that
FIRST = {
    "phalanx.comm.pending": ("settles",),
    "phalanx.grad.exchange": ("side stream",),
    "phalanx.grad.finite": ("warns of NaN", "float16 wire"),
    "phalanx.grad.reducer": ("overlap",),
}


def is_same(mutant):
    return any(f"{mutant.kind} {mutant.text}".startswith(text) for text in SAME)


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in MODES and name not in VERBS])
def test_the_product_passes(name):  # the others are in test_modes and test_verbs
    SCENARIOS[name](0)


def fails(play, seed):
    try:
        play(seed)
    except Exception:  # noqa: BLE001  whatever it is, it was caught
        return True
    return False


@pytest.mark.parametrize("mutant", [m for m in ALL if not is_same(m)], ids=str)
def test_a_mutant_is_caught(mutant):
    names = dict.fromkeys((*FIRST.get(mutant.module, ()), *SCENARIOS))
    with mutant.applied():
        assert any(fails(SCENARIOS[name], seed) for seed in range(SEEDS) for name in names)


def test_there_are_mutants_and_all_exceptions_are_of_this_product():
    assert len(ALL) > 20
    assert {mutant.kind for mutant in ALL} == {"drop", "unrecorded", "swap"}
    for text in SAME:
        assert any(f"{mutant.kind} {mutant.text}".startswith(text) for mutant in ALL), text
