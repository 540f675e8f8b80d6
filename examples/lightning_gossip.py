"""A small CNN on handwritten digits with Lightning, trained by gossip. `diff` it with lightning_cnn_before.py.

    python examples/lightning_gossip.py --ranks 2

Without an argument PhalanxStrategy() averages gradients, as DDPStrategy does.
"""

import argparse

import lightning
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx.integrations.lightning import PhalanxStrategy

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch", type=int, default=60, help="per rank")
parser.add_argument("--ranks", type=int, default=2)
args = parser.parse_args()


def digits(split):
    """Images of 8x8 with values from 0 to 16, which come with Phalanx: 1437 to train, 360 to test."""
    source = phalanx.data.open("digits", split=split)
    return TensorDataset(source.x / 16, source.y)


class Digits(lightning.LightningModule):
    """A small CNN, how it is trained, and what is printed."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(128, 10),
        )  # fmt: skip

    def training_step(self, batch, number):
        x, y = batch
        loss = cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, number):
        x, y = batch
        right = (self.net(x).argmax(dim=1) == y).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def on_train_epoch_end(self):
        metrics = self.trainer.callback_metrics
        self.print(f"epoch {self.current_epoch + 1:2d}  loss {metrics['loss']:.6f}  accuracy {metrics['accuracy']:.4f}")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)]


if __name__ == "__main__":
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        strategy=PhalanxStrategy(sync=phalanx.Gossip()),
        accelerator="cpu",
        devices=args.ranks,
        max_epochs=args.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    train = DataLoader(digits("train"), batch_size=args.batch, shuffle=True, drop_last=True)
    trainer.fit(Digits(), train, DataLoader(digits("test"), batch_size=args.batch))
