"""Networks, optimizers, losses, data and tasks as a user has them: `own_things:Net` and so on are import paths to these."""

import torch
from torch import nn
from torch.nn import functional as F

from phalanx.data import open as open_source
from phalanx.train.task import Metric, Task


class Net(nn.Sequential):
    """A perceptron."""

    def __init__(self, num_classes, in_channels=1, *, width=8, shape=(8, 8), activation="relu", drop=None):
        kinds = {"relu": nn.ReLU, "tanh": nn.Tanh}
        assert isinstance(shape, tuple)
        super().__init__(
            nn.Flatten(), nn.Linear(in_channels * shape[0] * shape[1], width), kinds[activation](), nn.Linear(width, num_classes)
        )


def make_model(width=4, num_classes=10, **others):
    return Net(num_classes, width=width)


def not_a_model():
    return 3


def frozen():
    return nn.Linear(2, 2).requires_grad_(False)


def needy(depth, num_classes):
    return Net(num_classes)


def raises(width=1):
    raise RuntimeError("two\nlines")


def counted(num_classes):
    return Net(num_classes, width=int(torch.linspace(1, 5, 3)[-1].item()))


def wrong_outputs():
    return Net(7)


def wrong_inputs(num_classes):
    return Net(num_classes, shape=(3, 3))


NUMBER = 3


def focal(outputs, y, gamma=2.0):
    likely = F.log_softmax(outputs, 1).gather(1, y[:, None])[:, 0]
    return (-((1 - likely.exp()) ** gamma) * likely).mean()


def per_sample(outputs, y):
    return F.cross_entropy(outputs, y, reduction="none").repeat(2)


def without_gradient(outputs, y):
    return F.cross_entropy(outputs.detach(), y)


class Weighted(nn.Module):
    """Cross entropy in which the first class counts more."""

    def __init__(self, first=1.0, learned=False):
        super().__init__()
        self.register_buffer("weight", torch.tensor([first] + [1.0] * 9))
        if learned:
            self.scale = nn.Parameter(torch.ones(()))

    def forward(self, outputs, y):
        return F.cross_entropy(outputs, y, weight=self.weight)


class Lion(torch.optim.Optimizer):
    """Chen et al., arXiv 2302.06675, without its second beta; like others it refuses a rate of 0."""

    def __init__(self, params, lr, beta=0.9, weight_decay=0.0):
        assert lr > 0
        assert all(isinstance(p, (torch.Tensor, dict)) for p in params)
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * m.lerp(p.grad, 1 - group["beta"]).sign())
                m.lerp_(p.grad, 0.01)


def of_options(params, **options):
    return torch.optim.SGD(params, **options)


class Pairs:
    """Points and numbers, one by one."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return torch.full((3,), i / self.n), torch.tensor([i / self.n])


def make_source(split, n=240):
    return Pairs(n if split == "train" else 30)


def tensors(split, classes=3):
    draw = torch.Generator().manual_seed(len(split))
    y = torch.randint(classes, (120,), generator=draw, dtype=torch.int32)
    return torch.randn(120, 2, generator=draw) + y[:, None], y


def digits(split):
    return open_source("digits", split=split)


def endless(split):
    return iter([])


def empty(split):
    return Pairs(0 if split == "test" else 10)


REGRESSION = Task(
    name="mine",
    loss=lambda outputs, y: (outputs - y).abs().mean(),
    measure=lambda outputs, y: {
        "loss": ((outputs - y).abs().sum(), len(y)),
        "worst": ((outputs - y).abs().max() * len(y), len(y)),
    },
    metrics=(Metric("worst", "worst error", lower_is_better=True), Metric("loss", "mean error", lower_is_better=True)),
    unit="points",
)


def make_task():
    return REGRESSION


def linear(inputs=3):
    return nn.Linear(inputs, 1)
