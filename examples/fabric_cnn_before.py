"""A small CNN on handwritten digits with Lightning Fabric: what fabric_cnn.py and fabric_gossip.py were made from. `diff` them.

python examples/fabric_cnn_before.py --ranks 2
"""

import argparse

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import phalanx

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch", type=int, default=60, help="per rank")
parser.add_argument("--ranks", type=int, default=2)
args = parser.parse_args()


def digits(split):
    """Images of 8x8 with values from 0 to 16, which come with Phalanx: 1437 to train, 360 to test."""
    source = phalanx.data.open("digits", split=split)
    return TensorDataset(source.x / 16, source.y)


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def main():
    fabric = Fabric(strategy=DDPStrategy(process_group_backend="gloo"), accelerator="cpu", devices=args.ranks)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    model = cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    train = fabric.setup_dataloaders(DataLoader(digits("train"), batch_size=args.batch, shuffle=True, drop_last=True))

    for epoch in range(args.epochs):
        for number, (x, y) in enumerate(train):
            with fabric.no_backward_sync(model, enabled=number % 2 == 0):
                loss = cross_entropy(model(x), y)
                fabric.backward(loss / 2)
            if number % 2:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        loss = fabric.all_reduce(loss.detach())
        fabric.print(f"epoch {epoch + 1:2d}  loss {loss:.6f}")


if __name__ == "__main__":
    main()
