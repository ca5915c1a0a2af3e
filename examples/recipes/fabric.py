"""Lightning Fabric: its strategy for FSDP2, with compression; save, and resume as if nothing had
happened.

python examples/recipes/fabric.py --checkpoint runs/fabric        # starts both ranks itself
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric  # pyright: ignore
from task import Reverser, batch, loss_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import tagc
from tagc.integrations.fabric import TagcStrategy


def shard(model: Any, mesh: DeviceMesh) -> Any:
    shards = mesh["data_parallel"]
    for layer in model.layers:
        fully_shard(layer, mesh=shards)
    return fully_shard(model, mesh=shards)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--policy", default="hybrid")
    parser.add_argument("--checkpoint", type=Path, help="saved here at the end, resumed from here")
    args = parser.parse_args()

    strategy = TagcStrategy(
        shard, policy=args.policy, data_parallel_size=args.ranks, tensor_parallel_size=1
    )
    fabric = Fabric(
        accelerator="cuda" if torch.cuda.is_available() else "cpu",
        devices=args.ranks,
        strategy=strategy,
    )
    fabric.launch()
    fabric.seed_everything(0)
    model = fabric.setup(Reverser())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if args.checkpoint and args.checkpoint.exists():
        fabric.load(args.checkpoint, state)  # residuals, too
    for step in range(state["step"], args.steps):
        tokens = batch(step, fabric.global_rank, fabric.device)
        loss = loss_of(model(tokens), tokens)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        fabric.print(f"step {step}, loss {loss.item():.9g}")
    if args.checkpoint:
        fabric.save(args.checkpoint, {**state, "step": args.steps})
    metrics = tagc.compressor(model.module).metrics()
    ratio = metrics.dense_bytes / metrics.wire_bytes
    fabric.print(f"{ratio:.1f} times fewer gradient bytes")


if __name__ == "__main__":
    main()
