"""Hugging Face Accelerate with FSDP2: save, and resume as if nothing had happened. On a CPU
Accelerate takes DistributedDataParallel instead, and tagc compresses its gradients.

accelerate launch --num_processes 2 examples/recipes/accelerate_fsdp2.py --checkpoint runs/acc
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin  # pyright: ignore
from task import Reverser, batch, loss_of

import tagc
from tagc.integrations.accelerate import wrap


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--policy", default="hybrid")
    parser.add_argument("--from-step", type=int, default=0, help="steps before the checkpoint")
    parser.add_argument("--checkpoint", type=Path, help="saved here at the end, resumed from here")
    args = parser.parse_args()

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["TransformerEncoderLayer"],
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = Reverser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    wrap(accelerator, model, args.policy)  # save_state and load_state know of residuals now
    if args.from_step:
        accelerator.load_state(str(args.checkpoint))
    for step in range(args.from_step, args.steps):
        tokens = batch(step, accelerator.process_index, accelerator.device)
        loss = loss_of(model(tokens), tokens)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step}, loss {loss.item():.9g}")
    if args.checkpoint:
        accelerator.save_state(str(args.checkpoint))
    metrics = tagc.compressor(model).metrics()
    ratio = metrics.dense_bytes / metrics.wire_bytes
    accelerator.print(f"{ratio:.1f} times fewer gradient bytes")
    accelerator.end_training()


if __name__ == "__main__":
    main()
