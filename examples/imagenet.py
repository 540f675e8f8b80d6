"""ResNet-50 on ImageNet's folders on any number of ranks. `diff` it with imagenet_before.py to see what that took.

    torchrun --standalone --nproc-per-node 2 examples/imagenet.py            a few random images: to see that it runs
    torchrun --nnodes 8 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint host0:29400 examples/imagenet.py \\
        --data imagefolder:/data/imagenet --epochs 90 --batch 1024 --pixels 224 --out /shared/run            on every host

`phalanx train imagenet-resnet50` is the same with a progress line, a report and all options; this is for your own scripts.
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
parser.add_argument("--sync-batchnorm", action="store_true", help="statistics of the whole batch: exactly as one process")
parser.add_argument("--out", type=Path, help="where checkpoints go; an interrupted run continues from the last one")
args = parser.parse_args()

comm = phalanx.create_communicator()


def loader(split):
    source = phalanx.data.open(args.data, split=split)
    training = split == "train"
    decode = RandomResizedCrop(args.pixels) if training else CentreCrop(args.pixels, args.pixels * 8 // 7)
    normalise = Normalise((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    return source, phalanx.data.Loader(
        source,
        comm,
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
if args.sync_batchnorm:
    model = phalanx.convert_batchnorm(model, comm)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * args.batch / 256, momentum=0.9, weight_decay=5e-5)
optimizer = phalanx.create_multi_node_optimizer(optimizer, comm)
rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)

state = {"model": model, "optimizer": optimizer, "rate": rate, "train": train}
checkpoints = phalanx.Checkpointer(args.out, comm) if args.out else None
done = (checkpoints.load(**state) if checkpoints else None) or 0
evaluate = phalanx.create_multi_node_evaluator(evaluate, comm)

for epoch in range(done + 1, args.epochs + 1):
    for x, y in train:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
    rate.step()
    phalanx.average_batchnorm_(model, comm)  # each rank has seen other samples
    top1 = evaluate(model, val)["top1"]
    loss = comm.all_reduce(loss.detach(), "mean")
    if comm.rank == 0:
        print(f"epoch {epoch:2d}  loss {loss:.6f}  top-1 {top1:.4f}")
    if checkpoints:
        checkpoints.save(epoch, **state)  # copies; the disk is written to while training continues
if checkpoints:
    checkpoints.close()
