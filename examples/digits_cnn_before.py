"""A small CNN on handwritten digits in one process: what digits_cnn.py was made from. `diff` the two.

python examples/digits_cnn_before.py
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import phalanx

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--batch", type=int, default=120)
args = parser.parse_args()


def digits(split):
    """Images of 8x8 with values from 0 to 16, which come with Phalanx: 1437 to train, 360 to test."""
    source = phalanx.data.open("digits", split=split)
    return TensorDataset(source.x / 16, source.y)


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


def evaluate(model, loader):
    right = seen = 0
    with torch.no_grad():
        for x, y in loader:
            right += (model(x).argmax(dim=1) == y).sum().item()
            seen += len(y)
    return {"accuracy": (right, seen)}


torch.manual_seed(0)
train = DataLoader(digits("train"), batch_size=args.batch, shuffle=True, drop_last=True)
test = DataLoader(digits("test"), batch_size=args.batch)

model = cnn()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
steps = args.epochs * len(train)
rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=steps, pct_start=0.1, cycle_momentum=False)

for epoch in range(args.epochs):
    for x, y in train:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        rate.step()
    print(f"epoch {epoch + 1:2d}  loss {loss:.6f}")

right, seen = evaluate(model, test)["accuracy"]
print(f"test accuracy {right / seen:.4f}")
