"""Ranks of tests/integrations/test_lightning.py: `python lightning_program.py PLAY`. Each play asserts on every rank."""

from __future__ import annotations

import copy
import importlib
import os
import sys
import tempfile
import warnings

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import phalanx

warnings.simplefilter("ignore")
NAME = "pytorch_lightning" if sys.argv[2:] == ["pytorch_lightning"] else "lightning.pytorch"
L = importlib.import_module(NAME)
DDPStrategy = importlib.import_module(f"{NAME}.strategies").DDPStrategy
PhalanxStrategy = importlib.import_module(f"phalanx.integrations.{NAME.split('.')[0]}").PhalanxStrategy

torch.manual_seed(1)
X = torch.randn(96, 8)
DATA = TensorDataset(X, X.sin().sum(dim=1, keepdim=True))
TORN = {}  # what a rank saw: by name


class Net(L.LightningModule):
    """A perceptron."""

    def __init__(self, optimizer=torch.optim.AdamW, norm=False):
        super().__init__()
        layers = [torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32) if norm else torch.nn.Tanh(), torch.nn.Linear(32, 1)]
        self.net = torch.nn.Sequential(*layers)
        self.make = optimizer
        self.seen = []

    def training_step(self, batch, number):
        loss = mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        self.seen.append(loss.detach())
        return loss

    def validation_step(self, batch, number):
        self.log("validation", mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)
        TORN["validated"] = flat(self)

    def configure_optimizers(self):
        optimizer = self.make(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def fit(strategy, model, *, epochs=2, resume=None, save=None, **options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_epochs=epochs, **quiet, **options)
    trainer.fit(model, DataLoader(DATA, batch_size=8), DataLoader(DATA, batch_size=16), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return trainer


def equal_on_all_ranks(x, trainer):
    every = [torch.empty_like(x) for _ in range(2)]
    torch.distributed.all_gather(every, x)
    return torch.equal(*every)


def fresh(**how):
    torch.manual_seed(0)
    return Net(**how)


def as_ddp():
    """Accumulation, clipping, mixed precision, a scheduler and validation: the same model as with DDP."""
    options = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}
    for more in ({}, {"precision": "bf16-mixed"}, {"gradient_clip_algorithm": "value"}):
        theirs, ours = fresh(), fresh()
        fit(DDPStrategy(process_group_backend="gloo"), theirs, **options, **more)
        trainer = fit(PhalanxStrategy(), ours, **options, **more)
        torch.testing.assert_close(flat(ours), flat(theirs), rtol=1e-5, atol=1e-6)
        assert equal_on_all_ranks(flat(ours), trainer)
        torch.testing.assert_close(torch.stack(ours.seen), torch.stack(theirs.seen), rtol=1e-5, atol=1e-6)
        assert trainer.strategy.__dict__.get("comm") is None, "closed after fit"


def replicas():
    """Ranks that build different models train rank 0's; so do those that only validate."""
    torch.manual_seed(int(os.environ["RANK"]))
    mine = Net()
    begin = flat(mine)
    trainer = fit(PhalanxStrategy(process_group_backend="phalanx"), mine, epochs=1)
    assert equal_on_all_ranks(flat(mine), trainer)
    assert not equal_on_all_ranks(begin, trainer)
    strategy = trainer.strategy
    rank = torch.tensor(float(trainer.global_rank))
    assert strategy.reduce(rank.clone(), reduce_op="sum") == 1.0
    assert strategy.reduce(rank.clone()) == 0.5
    assert strategy.broadcast({"from": trainer.global_rank}) == {"from": 0}
    assert strategy.all_gather(rank.view(1)).flatten().tolist() == [0.0, 1.0]
    assert strategy.reduce_boolean_decision(decision=bool(rank), all=False)
    strategy.barrier()
    result = trainer.validate(mine, DataLoader(DATA, batch_size=16), verbose=False)
    assert result[0]["validation"] > 0


def kinds():
    """Gossip and the other ways of the multi-node optimizer: replicas agree where they are evaluated, saved and returned."""
    ways = [
        {"sync": phalanx.Gossip()},
        {"sync": phalanx.Gossip(exchange="gradients")},
        {"double_buffering": True},
        {"sync": phalanx.AllReduce(fused=True)},
        {"wire": torch.bfloat16},
    ]
    for way in ways:
        model = fresh(optimizer=torch.optim.SGD, norm=True)
        before = flat(model)
        trainer = fit(PhalanxStrategy(**way), model)
        assert equal_on_all_ranks(flat(model), trainer), way
        assert equal_on_all_ranks(TORN["validated"], trainer), way
        assert equal_on_all_ranks(model.net[1].running_mean.clone(), trainer), way
        assert (flat(model) - before).abs().max() > 1e-3, way
        trainer.validate(model, DataLoader(DATA, batch_size=16), verbose=False)


def checkpoint():
    """A run that is saved after one epoch and continued is the run that was not interrupted."""
    for sync in (None, phalanx.Gossip()):
        path = f"{tempfile.gettempdir()}/phalanx-test-{os.environ['MASTER_PORT']}.ckpt"
        whole, half, rest = fresh(), fresh(), Net()
        fit(PhalanxStrategy(sync=sync), whole, epochs=2)
        fit(PhalanxStrategy(sync=sync), half, epochs=1, save=path)
        trainer = fit(PhalanxStrategy(sync=sync), rest, epochs=2, resume=path)
        assert torch.equal(flat(rest), flat(whole)), sync
        assert equal_on_all_ranks(flat(rest), trainer)
        saved = torch.load(path, weights_only=True)
        torch.testing.assert_close(torch.cat([v.reshape(-1) for v in saved["state_dict"].values()]), flat(half))


def manual():
    """Two optimizers that the module steps by hand, as in a GAN."""

    class Two(Net):
        automatic_optimization = False

        def training_step(self, batch, number):
            first, second = self.optimizers()
            for optimizer in (first, second):
                optimizer.zero_grad()
            loss = mse_loss(self.net(batch[0]), batch[1])
            self.manual_backward(loss)
            first.step()
            second.step()
            self.seen.append(loss.detach())

        def configure_optimizers(self):
            return [torch.optim.SGD(layer.parameters(), lr=0.05) for layer in (self.net[0], self.net[2])]

    torch.manual_seed(0)
    theirs = Two()
    ours = copy.deepcopy(theirs)
    fit(DDPStrategy(process_group_backend="gloo"), theirs, epochs=1)
    trainer = fit(PhalanxStrategy(), ours, epochs=1)
    torch.testing.assert_close(flat(ours), flat(theirs), rtol=1e-5, atol=1e-6)
    assert equal_on_all_ranks(flat(ours), trainer)


for play in sys.argv[1].split(","):
    {"as_ddp": as_ddp, "replicas": replicas, "kinds": kinds, "checkpoint": checkpoint, "manual": manual}[play]()
    print("did", play, flush=True)
torch.distributed.destroy_process_group()
