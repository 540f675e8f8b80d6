"""A model measured for the planner: its parameters, the order and the times of their gradients, and a file that a plan reads."""

import time

import pytest
import torch
from torch import nn

from phalanx.cli.main import main
from phalanx.cluster.workload_file import from_json
from phalanx.train.profile_model import profile_model, write_profile


class Slow(torch.autograd.Function):
    """Takes its time in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.03)
        return gradient


class Net(nn.Module):
    """Backward reaches `last` at once, `first` after a wait."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False)

    def forward(self, x):
        return self.last(Slow.apply(self.first(x)))


def measured(model, optimizer=None):
    def batch(n):
        return torch.ones(n, 4), torch.zeros(n, dtype=torch.long)

    def loss(outputs, labels):
        time.sleep(1e-4 * len(labels))  # so that a larger batch takes longer, whatever the machine does
        return nn.functional.cross_entropy(outputs, labels)

    return profile_model(model, batch, loss, sizes=(10, 400), samples=1000, optimizer=optimizer, repeat=3)


def test_gradients_are_in_the_order_in_which_they_come_with_their_share_of_backward():
    model, compute = measured(Net())
    assert [(tensor.name, tensor.elements) for tensor in model.tensors] == [("first.weight", 16), ("last.weight", 8)]
    assert model.tensors[0].work > 0.6  # the wait
    assert sum(tensor.work for tensor in model.tensors) == pytest.approx(1, abs=0.05)
    assert 5e-5 < compute.per_sample < 5e-4
    assert compute.seconds(400) > compute.seconds(10) > 0.03
    assert (model.samples, model.name) == (1000, "Net")


def test_nothing_is_changed_by_being_measured():
    net = Net()
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    net(torch.ones(3, 4)).sum().backward()
    opt.step()
    before = [p.detach().clone() for p in net.parameters()]
    momentum = [opt.state[p]["momentum_buffer"].clone() for p in net.parameters()]
    _, compute = measured(net, opt)
    assert compute.optimizer > 0
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before))
    assert all(torch.equal(opt.state[p]["momentum_buffer"], m) for p, m in zip(net.parameters(), momentum))


def test_a_model_of_ones_own_is_planned(tmp_path, capsys):
    path = tmp_path / "net.json"
    model, compute = measured(Net())
    write_profile(path, model, compute)
    assert from_json(path.read_text()) == (model, compute)
    ask = ["plan", "--cluster", "lab", "--backend", "gloo", "--batch", "80", "--model", str(path)]
    assert main(ask) == 0
    assert "Net on lab" in (shown := capsys.readouterr().out)
    assert "give --epochs; epochs to an accuracy are published only for ResNet-50" in shown
    assert main([*ask, "--rate", "100@10"]) == 0
    assert main([*ask, "--overhead", "3"]) == 2
    path.write_text("{}")
    assert main(ask) == 2
    assert "not a model" in capsys.readouterr().err


def test_a_model_without_parameters_is_refused():
    with pytest.raises(ValueError, match="no trainable parameters"):
        measured(nn.Identity())
