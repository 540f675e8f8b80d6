"""A script that uses DistributedDataParallel: what ddp.py was made from. `diff` the two.

torchrun --standalone --nproc-per-node 2 examples/ddp_before.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch", type=int, default=64, help="per rank")
args = parser.parse_args()


class Spirals(Dataset):
    """Points of three spirals in a plane: a data set of your own."""

    def __init__(self, n=1536):
        draw = torch.Generator().manual_seed(1)
        self.labels = torch.arange(n) % 3
        turn = torch.rand(n, generator=draw)
        angle = 4 * turn + self.labels * 2.0944 + 0.1 * torch.randn(n, generator=draw)
        self.points = torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.points[i], self.labels[i]


def main():
    data = Spirals()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch, sampler=sampler)

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        total = loss.detach() / dist.get_world_size()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1:2d}  loss {total:.6f}")


dist.init_process_group("gloo")
main()  # what it made is gone before the group is: DDP keeps a hand on it
dist.destroy_process_group()
