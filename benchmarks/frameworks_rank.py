"""One rank of benchmarks/frameworks.py: a script of Lightning, accelerate or transformers that trains in turns.

What differs between contenders is what a user changes. All else of a script is the same text.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import phalanx


class Turns:
    """A job trains `length` steps when its file `go.N` exists, then writes `done.N.RANK`. The others sleep meanwhile."""

    def __init__(self, directory: Path, length: int, turns: int) -> None:
        self._directory, self._length, self.steps = directory, length, length * turns
        self._turn, self._step, self._begun = 0, 0, 0.0
        self.seconds: list[float] = []  # of a step, per turn
        self.losses: list[float] = []

    def wait(self) -> None:
        """Before the first step."""
        while not (self._directory / f"go.{self._turn}").exists():
            time.sleep(0.01)
        self._begun = time.perf_counter()

    def stepped(self, loss: Any) -> None:
        """After every step."""
        self.losses.append(float(loss))
        self._step += 1
        if self._step % self._length == 0:
            self.seconds.append((time.perf_counter() - self._begun) / self._length)
            (self._directory / f"done.{self._turn}.{os.environ['RANK']}").touch()
            self._turn += 1
            if self._step < self.steps:
                self.wait()

    def tell(self) -> None:
        """For rank 0: the result of this job, as one line."""
        if os.environ["RANK"] == "0":
            print(json.dumps({"seconds": self.seconds, "losses": self.losses}), flush=True)


class Images(torch.utils.data.Dataset):
    """Random images of 64x64, as many as are asked for."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.randn(3, 64, 64, generator=torch.Generator().manual_seed(i)), i % 1000


def lightning(contender: str, turns: Turns, batch: int) -> None:
    """ResNet-50 in a LightningModule."""
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    from phalanx.integrations.lightning import PhalanxStrategy

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = phalanx.models.resnet50()

        def training_step(self, pair: Any, number: int) -> torch.Tensor:
            loss = cross_entropy(self.net(pair[0]), pair[1])
            self.last = loss.detach()
            return loss

        def on_train_start(self) -> None:
            turns.wait()

        def on_train_batch_end(self, *_: Any) -> None:
            turns.stepped(self.last)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    strategy = PhalanxStrategy() if contender == "optimizer" else DDPStrategy(process_group_backend=contender)
    lightning.seed_everything(0, verbose=False)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    ranks = int(os.environ["WORLD_SIZE"])
    trainer = lightning.Trainer(strategy=strategy, accelerator="cpu", devices=ranks, max_steps=turns.steps, **quiet)
    trainer.fit(Net(), torch.utils.data.DataLoader(Images(turns.steps * batch * ranks), batch_size=batch))


def accelerate(contender: str, turns: Turns, batch: int) -> None:
    """ResNet-50 in a loop."""
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    torch.distributed.init_process_group("phalanx" if contender == "phalanx" else "gloo")
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    model: Any = phalanx.models.resnet50()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader: Any = torch.utils.data.DataLoader(Images(turns.steps * batch * accelerator.num_processes), batch_size=batch)
    comm = phalanx.create_communicator() if contender in ("hook", "optimizer") else None
    if contender == "optimizer":
        optimizer = phalanx.create_multi_node_optimizer(optimizer, comm)
        model = accelerator.prepare_model(model, evaluation_mode=True)
    else:
        model = accelerator.prepare(model)
    if contender == "hook":
        model.register_comm_hook(comm, phalanx.ddp_hook)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    turns.wait()
    for x, y in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        turns.stepped(loss)


def transformers(contender: str, turns: Turns, batch: int) -> None:
    """A GPT-2 of 14 million parameters in a Trainer, with AdamW, on sequences of 64 words."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

    from phalanx.integrations.transformers import PhalanxTrainer

    class Words(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 1 << 20

        def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
            words = torch.randint(8192, (64,), generator=torch.Generator().manual_seed(i))
            return {"input_ids": words, "labels": words}

    last: list[Any] = [0.0]
    kind: Any = PhalanxTrainer if contender == "optimizer" else Trainer

    class Seen(kind):  # type: ignore[misc, valid-type]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            last[0] = super().training_step(*args, **kwargs)
            return last[0]

    class Taking(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            if contender == "hook":
                trainer.model_wrapped.register_comm_hook(phalanx.create_communicator(), phalanx.ddp_hook)
            turns.wait()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            turns.stepped(last[0])

    torch.distributed.init_process_group("phalanx" if contender == "phalanx" else "gloo")
    set_seed(0)
    config = GPT2Config(vocab_size=8192, n_positions=64, n_embd=384, n_layer=6, n_head=6, bos_token_id=0, eos_token_id=0)
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        max_steps=turns.steps,
        per_device_train_batch_size=batch,
        ddp_find_unused_parameters=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Seen(model=GPT2LMHeadModel(config), args=args, train_dataset=Words(), callbacks=[Taking()])
    trainer.train()


SCRIPTS = {"lightning": lightning, "accelerate": accelerate, "transformers": transformers}
CONTENDERS = {  # what a user writes, from the fewest changes to the most
    "lightning": ("gloo", "phalanx", "optimizer"),  # on a CPU Lightning does not register a DDP hook
    "accelerate": ("gloo", "phalanx", "hook", "optimizer"),
    "transformers": ("gloo", "phalanx", "hook", "optimizer"),
}
