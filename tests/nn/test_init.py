"""Draws from (seed, name): the same on every rank, whatever was built or drawn before; checked by one hash."""

import copy
import threading

import pytest
import torch
from torch import nn

import phalanx
from phalanx.nn.init import check_replicas, digest
from phalanx.nn.models.initial import initialize_


def layers():
    return {
        "conv": lambda: nn.Conv2d(3, 4, 3),
        "norm": lambda: nn.BatchNorm2d(4),
        "table": lambda: nn.Embedding(7, 4),
        "rnn": lambda: nn.GRU(4, 3),
        "attend": lambda: nn.TransformerEncoderLayer(8, 2, 16),
        "head": lambda: nn.Linear(4, 2),
    }


def build(order, seed):
    torch.manual_seed(seed)
    made = layers()
    return nn.ModuleDict({name: made[name]() for name in order})


ORDER = list(layers())


def test_order_and_past_do_not_matter():
    a, b = build(ORDER, 1), build(ORDER[::-1], 2)
    with torch.no_grad():
        b["norm"].running_mean.fill_(3)  # a reset batch norm has forgotten what it saw
    assert digest(a) != digest(b)
    for model in (a, b):
        phalanx.init_parameters_(model, seed=5)
    assert digest(a) == digest(b)
    other = copy.deepcopy(a)
    phalanx.init_parameters_(other, seed=6)
    assert digest(other) != digest(a)
    assert not torch.equal(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])[0].weight, a["head"].weight)


def test_equal_layers_of_other_names_differ_and_a_new_layer_changes_none():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    phalanx.init_parameters_(model, 0)
    assert not torch.equal(model[0].weight, model[1].weight)
    longer = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    phalanx.init_parameters_(longer, 0)
    assert torch.equal(longer[1].weight, model[1].weight)


def test_the_distribution_is_the_modules_own():
    layer = nn.Sequential(nn.Linear(100, 1000))
    phalanx.init_parameters_(layer, 3)
    bound = 1 / 100**0.5  # uniform, torch's default
    assert float(layer[0].weight.detach().abs().max()) <= bound
    assert float(layer[0].weight.detach().std()) == pytest.approx(bound / 3**0.5, rel=0.02)
    phalanx.init_parameters_(layer, 3, initialize=initialize_)
    assert float(layer[0].weight.detach().std()) == pytest.approx(0.01, rel=0.02)


def test_torchs_generator_is_left_as_it_was():
    model = build(ORDER, 0)
    torch.manual_seed(1)
    wanted = torch.rand(3)
    torch.manual_seed(1)
    phalanx.init_parameters_(model, 0)
    assert torch.equal(torch.rand(3), wanted)


def test_other_threads_may_draw_meanwhile():
    """Ranks may be threads, and torch's generator is one for all of them."""
    over = threading.Event()

    def disturb():
        while not over.is_set():
            torch.rand(3)

    found = set()
    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        for _ in range(20):
            model = build(ORDER, 0)
            phalanx.init_parameters_(model, 4)
            found.add(digest(model))
    finally:
        over.set()
        thread.join()
    assert len(found) == 1


def test_what_cannot_take_a_generator_is_refused():
    def noise(module):
        module.weight.copy_(torch.randn_like(module.weight))

    with pytest.raises(ValueError, match=r"randn_like takes no generator: draw with torch\.randn"):
        phalanx.init_parameters_(nn.Linear(2, 2), 0, initialize=noise)


def test_zero_gamma_by_name():
    model = phalanx.models.resnet_cifar(8)
    phalanx.init_parameters_(model, 0, initialize=initialize_, zero_gamma=lambda name: name.endswith("bn2"))
    weights = {name: m.weight for name, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    zero = {name for name, w in weights.items() if not w.any()}
    assert zero
    assert zero == {name for name in weights if name.endswith("bn2")}


def test_a_module_that_cannot_draw_is_named():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    with pytest.raises(ValueError, match=r"1 \(Bare\) owns parameters and has no reset_parameters"):
        phalanx.init_parameters_(nn.Sequential(nn.Linear(2, 2), Bare()), 0)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_ranks_agree_by_one_hash(n):
    def equal(comm):
        model = build(ORDER[comm.rank :] + ORDER[: comm.rank], comm.rank)
        phalanx.init_parameters_(model, seed=9)
        check_replicas(model, comm)
        return digest(model)

    assert len(set(phalanx.run_local(n, equal, timeout=20))) == 1


def test_the_rank_that_differs_is_named_on_all():
    def unequal(comm):
        model = nn.Linear(2, 2)
        phalanx.init_parameters_(model, seed=1 if comm.rank == 2 else 0)
        with pytest.raises(RuntimeError, match=r"rank\(s\) 2 differs"):
            check_replicas(model, comm)

    phalanx.run_local(4, unequal, timeout=20)


def test_the_hash_sees_every_bit():
    model = build(ORDER, 0)
    before = digest(model)
    with torch.no_grad():
        model["norm"].running_var[3] = torch.nextafter(model["norm"].running_var[3], torch.tensor(2.0))
    assert digest(model) != before
