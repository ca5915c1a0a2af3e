"""Lightning's Trainer: its strategy for FSDP2, or with --ddp for DDP, with compression; save, and
resume as if nothing had happened.

python examples/recipes/lightning_trainer.py --checkpoint runs/lightning  # starts both ranks
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything  # pyright: ignore
from task import Reverser, batch, loss_of
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from tagc.integrations.lightning import TagcDDPStrategy, TagcStrategy


class Task(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model: Any = Reverser()

    def configure_model(self) -> None:
        if self.device_mesh is None:  # DDP
            return
        shards = self.device_mesh["data_parallel"]
        for layer in self.model.layers:
            fully_shard(layer, mesh=shards)
        fully_shard(self.model, mesh=shards)

    def training_step(self, _: Any, index: int) -> Any:
        # By the step, and not by the loader: Lightning begins that anew when it resumes.
        tokens = batch(self.global_step, self.global_rank, self.device)
        loss = loss_of(self.model(tokens), tokens)
        self.print(f"step {self.global_step}, loss {loss.item():.9g}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--policy", default="hybrid")
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--checkpoint", type=Path, help="saved here at the end, resumed from here")
    args = parser.parse_args()

    strategy = (
        TagcDDPStrategy(policy=args.policy)
        if args.ddp
        else TagcStrategy(policy=args.policy, data_parallel_size=args.ranks, tensor_parallel_size=1)
    )
    seed_everything(0, verbose=False)
    trainer = Trainer(
        accelerator="cuda" if torch.cuda.is_available() else "cpu",
        devices=args.ranks,
        strategy=strategy,
        max_steps=args.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    task = Task()
    resumed = args.checkpoint if args.checkpoint and args.checkpoint.exists() else None
    trainer.fit(task, DataLoader(TensorDataset(torch.arange(10**6))), ckpt_path=resumed)
    if args.checkpoint:
        trainer.save_checkpoint(args.checkpoint)  # residuals, too
    metrics = strategy.compressor.metrics()
    ratio = metrics.dense_bytes / metrics.wire_bytes
    task.print(f"{ratio:.1f} times fewer gradient bytes")


if __name__ == "__main__":
    main()
