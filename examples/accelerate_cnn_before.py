"""A small CNN on handwritten digits with accelerate: what accelerate_cnn.py was made from. `diff` the two.

torchrun --standalone --nproc-per-node 2 examples/accelerate_cnn_before.py
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import phalanx

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch", type=int, default=60, help="per rank")
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
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    model = cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train = DataLoader(digits("train"), batch_size=args.batch, shuffle=True, drop_last=True)
    test = DataLoader(digits("test"), batch_size=args.batch)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)

    for epoch in range(args.epochs):
        for x, y in train:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        loss = accelerator.reduce(loss.detach(), "mean")
        right = [accelerator.gather_for_metrics(model(x).argmax(dim=1) == y) for x, y in test]
        accelerator.print(f"epoch {epoch + 1:2d}  loss {loss:.6f}  accuracy {torch.cat(right).float().mean():.4f}")


torch.distributed.init_process_group("gloo")
main()  # what it made is gone before the group is: DDP keeps a hand on it
torch.distributed.destroy_process_group()
