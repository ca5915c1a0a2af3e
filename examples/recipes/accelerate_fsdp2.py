"""Hugging Face Accelerate with FSDP2: wrap what ``prepare`` returns. Needs GPUs: on a CPU
Accelerate takes DistributedDataParallel instead, which ``tagc.wrap`` refuses.

    accelerate launch --num_processes 2 examples/recipes/accelerate_fsdp2.py
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin  # pyright: ignore
from task import Reverser, batch, loss_of

import tagc


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["TransformerEncoderLayer"],
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = Reverser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    tagc.wrap(model, policy="hybrid")
    for step in range(args.steps):
        tokens = batch(step, accelerator.process_index, accelerator.device)
        loss = loss_of(model(tokens), tokens)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    metrics = tagc.compressor(model).metrics()
    ratio = metrics.dense_bytes / metrics.wire_bytes
    accelerator.print(f"loss {loss.item():.6f}, {ratio:.1f} times fewer gradient bytes")


if __name__ == "__main__":
    main()
