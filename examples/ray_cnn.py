"""A small CNN on handwritten digits with Ray Train, on Phalanx's backend. `diff` it with ray_cnn_before.py: one word.

python examples/ray_cnn.py --ranks 2
"""

import argparse
import tempfile

import ray
import torch
from ray import train
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import phalanx


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


def work(config):
    """Runs on every worker, in the process group that Ray has made."""
    torch.manual_seed(0)
    model = prepare_model(cnn())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = prepare_data_loader(DataLoader(digits("train"), batch_size=config["batch"], shuffle=True, drop_last=True))
    for epoch in range(config["epochs"]):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        mean = loss.detach() / train.get_context().get_world_size()
        torch.distributed.all_reduce(mean)
        if train.get_context().get_world_rank() == 0:
            print(f"epoch {epoch + 1:2d}  loss {mean:.6f}  backend {torch.distributed.get_backend()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=60, help="per rank")
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    ray.init(num_cpus=args.ranks, include_dashboard=False)
    trainer = TorchTrainer(
        work,
        train_loop_config={"epochs": args.epochs, "batch": args.batch},
        torch_config=TorchConfig(backend="phalanx"),
        scaling_config=train.ScalingConfig(num_workers=args.ranks),
        run_config=train.RunConfig(storage_path=tempfile.mkdtemp()),
    )
    trainer.fit()
