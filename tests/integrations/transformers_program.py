"""Ranks of tests/integrations/test_transformers.py: `python transformers_program.py DIRECTORY`. Asserts on every rank."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import phalanx
from phalanx.integrations.transformers import PhalanxTrainer

ROOT = Path(sys.argv[1])
torch.distributed.init_process_group("phalanx")
RANK = torch.distributed.get_rank()


class Counting(torch.utils.data.Dataset):
    """Sentences of 16 numbers."""

    def __len__(self):
        return 256

    def __getitem__(self, i):
        words = (i + (1 + i % 5) * torch.arange(16)) % 32
        return {"input_ids": words, "labels": words}


def arguments(name, **more):
    common = {"max_steps": 6, "gradient_accumulation_steps": 2, "save_strategy": "no"} | more
    return TrainingArguments(
        output_dir=str(ROOT / name),
        use_cpu=True,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        **common,
    )


def net(seed=0):
    set_seed(seed)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config)


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def equal_on_all_ranks(x):
    every = [torch.empty_like(x) for _ in range(2)]
    torch.distributed.all_gather(every, x)
    return torch.equal(*every)


def told(make):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
    return [str(each.message) for each in caught if "averages the gradients of this optimizer" in str(each.message)]


data = Counting()
theirs = net()
Trainer(model=theirs, args=arguments("ddp"), train_dataset=data).train()

# PhalanxTrainer computes what DDP computes, from rank 0's model, and nobody averages twice
ours = net(seed=RANK)
trainer = PhalanxTrainer(model=ours, args=arguments("ours"), train_dataset=data, eval_dataset=data)
assert told(trainer.train) == []
assert type(trainer.model_wrapped).__name__ == "Bare"
first = net()
assert RANK == 0 or not torch.equal(flat(first), flat(net(seed=RANK)))
torch.testing.assert_close(flat(ours), flat(theirs), rtol=1e-4, atol=1e-5)
assert equal_on_all_ranks(flat(ours))
assert trainer.evaluate()["eval_loss"] > 0
trainer.train()  # again, with what it has

# an optimizer of ours in a plain Trainer: DDP averages as well
with phalanx.create_communicator() as comm:
    model = net()
    optimizer = phalanx.create_multi_node_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), comm)
    plain = Trainer(model=model, args=arguments("twice"), train_dataset=data, optimizers=(optimizer, None))
    words = told(plain.train)
    assert len(words) == int(RANK == 0), words

# gossip: saved, continued, and equal on all ranks at the end
options = {"save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 1}
whole, rest = net(), net()
PhalanxTrainer(model=whole, args=arguments("gossip", **options), train_dataset=data, sync=phalanx.Gossip()).train()
assert equal_on_all_ranks(flat(whole))
again = PhalanxTrainer(model=rest, args=arguments("gossip", **options), train_dataset=data, sync=phalanx.Gossip())
again.train(resume_from_checkpoint=str(ROOT / "gossip" / "checkpoint-3"))
assert equal_on_all_ranks(flat(rest))
torch.testing.assert_close(flat(rest), flat(whole), rtol=1e-4, atol=1e-5)

print("did it", flush=True)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
