"""Lightning's Trainer, and its strategy: torchrun --nproc-per-node 2 examples/lightning_trainer.py. It needs lightning."""

import argparse
import os

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from gradcomp.integrations.lightning import GradcompStrategy

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--spec", default="topk:ratio=0.05", help="the compressor and its knobs (default topk:ratio=0.05)")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--folder", default="gradcomp-lightning", help="of checkpoints")
parser.add_argument("--resume", help="a checkpoint to go on from, with any number of ranks")
options = parser.parse_args()


class Module(lightning.LightningModule):
    """A small net on generated data."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))

    def training_step(self, batch, number):
        loss = cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)


x = torch.randn(1600, 20, generator=torch.Generator().manual_seed(0))
torch.manual_seed(0)
strategy = GradcompStrategy(options.spec)  # in place of strategy="ddp"
trainer = lightning.Trainer(
    strategy=strategy,
    devices=int(os.environ.get("WORLD_SIZE", "2")),
    accelerator="auto" if torch.cuda.is_available() else "cpu",
    max_epochs=options.epochs,
    accumulate_grad_batches=2,
    log_every_n_steps=10,
    logger=False,
    enable_progress_bar=False,
    callbacks=[ModelCheckpoint(options.folder, "{epoch}", save_top_k=-1)],
)
trainer.fit(Module(), DataLoader(TensorDataset(x, x[:, :5].argmax(1)), batch_size=8), ckpt_path=options.resume)
if trainer.is_global_zero:
    print({name: round(value.item(), 3) for name, value in trainer.logged_metrics.items()})
    print(f"the ranks exchange {strategy.handle.stats()['exchanges']}; checkpoints are in {options.folder}")
trainer.strategy.barrier()  # with gloo, torch 2.13 may abort a rank that ends while its last operation is let go
torch.distributed.destroy_process_group()
