"""ResNet-50 on ImageNet's folders in one process: what imagenet.py was made from. `diff` the two.

    python examples/imagenet_before.py                                       a few random images: to see that it runs
    python examples/imagenet_before.py --data imagefolder:/data/imagenet --epochs 90 --batch 256 --pixels 224

Of Phalanx it uses only what works without ranks: the reader of images and the model.
"""

import argparse
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import phalanx
from phalanx.data import CentreCrop, Encoded, Normalise, RandomResizedCrop

parser = argparse.ArgumentParser()
parser.add_argument("--data", default="synthetic:3x64x64,classes=4,n=32", help="imagefolder:DIR, shards:PATTERN, cifar10:DIR ...")
parser.add_argument("--model", default="resnet50", choices=["resnet18", "resnet50"])
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--pixels", type=int, default=64, help="of images from files")
parser.add_argument("--out", type=Path, help="where checkpoints go; an interrupted run continues from the last one")
args = parser.parse_args()


def loader(split):
    source = phalanx.data.open(args.data, split=split)
    training = split == "train"
    decode = RandomResizedCrop(args.pixels) if training else CentreCrop(args.pixels, args.pixels * 8 // 7)
    normalise = Normalise((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    return source, phalanx.data.Loader(
        source,
        batch=args.batch,
        shuffle=training,
        decode=decode if isinstance(source, Encoded) else None,  # what is in memory is pixels already
        transform=normalise,
    )


def evaluate(model, samples):
    right = seen = 0
    model.eval()
    with torch.no_grad():
        for x, y in samples:
            right += (model(x).argmax(dim=1) == y).sum().item()
            seen += len(y)
    model.train()
    return {"top1": (right, seen)}


source, train = loader("train")
_, val = loader("val")

torch.manual_seed(0)
model = getattr(phalanx.models, args.model)(num_classes=len(source.classes))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * args.batch / 256, momentum=0.9, weight_decay=5e-5)
rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)

state = {"model": model, "optimizer": optimizer, "rate": rate, "train": train}
done = 0
file = args.out / "checkpoint.pt" if args.out else None
if file and file.exists():
    saved = torch.load(file, weights_only=True)
    done = saved.pop("epoch")
    for name, value in saved.items():
        state[name].load_state_dict(value)

for epoch in range(done + 1, args.epochs + 1):
    for x, y in train:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
    rate.step()
    right, seen = evaluate(model, val)["top1"]
    print(f"epoch {epoch:2d}  loss {loss:.6f}  top-1 {right / seen:.4f}")
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save({name: value.state_dict() for name, value in state.items()} | {"epoch": epoch}, file)
