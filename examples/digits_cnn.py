"""A small CNN on scikit-learn's digits on any number of ranks. `diff` it with digits_cnn_before.py to see what that took.

    python examples/digits_cnn.py
    torchrun --standalone --nproc-per-node 2 examples/digits_cnn.py
    mpirun -n 2 python examples/digits_cnn.py

BATCH is the batch of all ranks together; its mean gradient is what one process would compute: a number of ranks that divides
it changes the rounding and the time, not the training.
"""

import math
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import phalanx

SEED = 0
EPOCHS = 30
BATCH = 120
PEAK_LR = 0.05
WARMUP = 3  # epochs


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images of 8x8 and labels: 1437 to train, 360 to test, always the same ones."""
    images, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(images).float().view(-1, 1, 8, 8) / 16
    y = torch.from_numpy(labels).long()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(SEED))
    train, test = order[360:], order[:360]
    return x[train], y[train], x[test], y[test]


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


def learning_rate(epoch: float) -> float:
    """Linear warm-up, then half a cosine to zero."""
    if epoch < WARMUP:
        return PEAK_LR * epoch / WARMUP
    return PEAK_LR * 0.5 * (1 + math.cos(math.pi * (epoch - WARMUP) / (EPOCHS - WARMUP)))


comm = phalanx.create_communicator()
BATCH -= BATCH % comm.size  # equal shares: then the mean over ranks is the mean over samples

begun = time.perf_counter()
x_train, y_train, x_test, y_test = digits()
steps = len(x_train) // BATCH

torch.manual_seed(SEED)  # the same on all ranks, so the same weights: nothing is broadcast
model = cnn()
optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, nesterov=True, weight_decay=5e-4)
optimizer = phalanx.create_multi_node_optimizer(optimizer, comm)  # its step averages gradients over the ranks

for epoch in range(EPOCHS):
    order = torch.randperm(len(x_train), generator=torch.Generator().manual_seed(epoch))
    for step in range(steps):
        rows = order[step * BATCH : (step + 1) * BATCH][comm.rank :: comm.size]
        optimizer.param_groups[0]["lr"] = learning_rate(epoch + (step + 1) / steps)
        optimizer.zero_grad()
        loss = cross_entropy(model(x_train[rows]), y_train[rows])
        loss.backward()
        optimizer.step()
    if epoch % 5 == 4:
        comm.all_reduce(loss.detach(), op="mean")
        if comm.rank == 0:
            print(f"epoch {epoch + 1:2d}  loss {loss:.4f}")

share = slice(comm.rank, None, comm.size)  # every test sample on exactly one rank
with torch.no_grad():
    right = (model(x_test[share]).argmax(dim=1) == y_test[share]).sum()
comm.all_reduce(right)

if comm.rank == 0:
    seconds = time.perf_counter() - begun
    print(f"test accuracy {right / len(y_test):.4f} ({right} of {len(y_test)}), a world of {comm.size}, {seconds:.1f} s")
comm.close()
