"""A small GPT-2 with Hugging Face's Trainer: what hf_trainer.py and hf_trainer_gossip.py were made from. `diff` them.

torchrun --standalone --nproc-per-node 2 examples/hf_trainer_before.py
"""

import argparse
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--batch", type=int, default=8, help="per rank")
args = parser.parse_args()


class Counting(torch.utils.data.Dataset):
    """Sentences of 32 numbers below 64, in which each number is the one before it plus the step of the sentence."""

    def __len__(self):
        return 4096

    def __getitem__(self, i):
        words = (i + (1 + i % 5) * torch.arange(32)) % 64
        return {"input_ids": words, "labels": words}


def main():
    set_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            use_cpu=True,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            logging_steps=5,
            save_strategy="no",
            ddp_find_unused_parameters=False,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Counting(),
    )
    trainer.train()
    if trainer.is_world_process_zero():
        for entry in trainer.state.log_history:
            if "loss" in entry:
                print(f"step {entry['step']:3d}  loss {float(entry['loss']):.6f}")


torch.distributed.init_process_group("gloo")
main()
torch.distributed.destroy_process_group()
