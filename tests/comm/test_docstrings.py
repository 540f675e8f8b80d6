"""The examples in the docstrings of the communicator's public names run, and the important verbs have one."""

import doctest
import inspect

import pytest
import torch

import phalanx

PUBLIC = [
    phalanx.Communicator,
    phalanx.CommunicationError,
    phalanx.Pending,
    phalanx.create_communicator,
    phalanx.ddp_hook,
    phalanx.run_local,
]
NAMES = {"phalanx": phalanx, "torch": torch}
EXAMPLES = [
    example
    for each in PUBLIC
    for part in [each, *(inspect.getmro(each)[1:-1] if inspect.isclass(each) else ())]
    if part.__module__.startswith("phalanx")
    for example in doctest.DocTestFinder(recurse=True).find(part, part.__name__, globs=dict(NAMES))
    if example.examples
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_example_runs(example):
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(example, out=said.append)
    assert not said, "".join(said)


@pytest.mark.parametrize("each", PUBLIC, ids=lambda each: each.__name__)
def test_every_public_name_has_an_example(each):
    assert ">>>" in (each.__doc__ or "")


def test_verbs_have_a_docstring_and_the_collective_ones_an_example():
    verbs = {name: verb for name, verb in inspect.getmembers(phalanx.Communicator) if not name.startswith("_")}
    assert [name for name, verb in verbs.items() if not inspect.getdoc(verb)] == []
    for name in ("all_reduce", "all_reduce_async", "bcast", "allgather", "reduce_scatter", "split", "bcast_obj", "allreduce_obj"):
        assert ">>>" in inspect.getdoc(verbs[name]), name


def test_an_example_that_is_wrong_is_noticed():
    wrong = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    assert doctest.DocTestRunner(verbose=False).run(wrong, out=lambda text: None).failed == 1
