"""The sources, one file each, and the table of their specs."""

from __future__ import annotations

from phalanx.data.source import Spec
from phalanx.data.sources import cifar, digits, idx, imagefolder, shards, synthetic, text

SPECS = {
    "digits": Spec("digits", lambda _, split: digits.load(split)),
    "mnist": Spec("mnist:DIR", lambda rest, split: idx.load("mnist", rest, split)),
    "fashion-mnist": Spec("fashion-mnist:DIR", lambda rest, split: idx.load("fashion-mnist", rest, split)),
    "cifar10": Spec("cifar10:DIR", lambda rest, split: cifar.load("cifar10", rest, split)),
    "cifar100": Spec("cifar100:DIR", lambda rest, split: cifar.load("cifar100", rest, split)),
    "imagefolder": Spec("imagefolder:DIR", imagefolder.load),
    "shards": Spec("shards:PATTERN", shards.load),
    "handbook": Spec("handbook", lambda _, split: text.load_handbook(split)),
    "text": Spec("text:FILE", text.load),
    "synthetic": Spec("synthetic:CxHxW[,classes=N][,n=N][,seed=N]", synthetic.load),
}
