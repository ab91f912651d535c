"""Hugging Face's Trainer, and the one new line: torchrun --nproc-per-node 2 examples/hf_trainer.py. It needs transformers."""

import argparse
import pydoc

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from gradcomp.integrations.transformers import attach

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--spec", default="topk:ratio=0.05", help="the compressor and its knobs (default topk:ratio=0.05)")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--folder", default="gradcomp-hf-trainer", help="of checkpoints")
parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, with any number of ranks")
options = parser.parse_args()

text = torch.tensor([*pydoc.render_doc(argparse).encode("ascii", "replace")])
rows = text[: len(text) // 32 * 32].view(-1, 32)
torch.manual_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=128, n_positions=32, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
)
trainer = Trainer(
    model,
    TrainingArguments(
        output_dir=options.folder,
        max_steps=options.steps,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        logging_steps=20,
        save_steps=50,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    ),
    train_dataset=[{"input_ids": row, "labels": row} for row in rows],
)
handle = attach(trainer, options.spec)  # the one new line, on all ranks

trainer.train(resume_from_checkpoint=options.resume or None)
if trainer.is_world_process_zero():
    stats = handle.stats()
    print(f"{options.spec}: the ranks exchange {stats['exchanges']}, {stats['compression']:.0f} times fewer bytes than dense")
torch.distributed.barrier()  # with gloo, torch 2.13 may abort a rank that ends while its last operation is let go
torch.distributed.destroy_process_group()
