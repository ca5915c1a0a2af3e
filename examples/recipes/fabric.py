"""Lightning Fabric: ``tagc.wrap`` goes where the model is sharded, into ``parallelize_fn``.

python examples/recipes/fabric.py        # starts both ranks itself
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from lightning.fabric import Fabric  # pyright: ignore
from lightning.fabric.strategies import ModelParallelStrategy  # pyright: ignore
from task import Reverser, batch, loss_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import tagc


def parallelize(model: Any, mesh: DeviceMesh) -> Any:
    shards = mesh["data_parallel"]
    for layer in model.layers:
        fully_shard(layer, mesh=shards)
    fully_shard(model, mesh=shards)
    return tagc.wrap(model, policy="hybrid")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()

    strategy = ModelParallelStrategy(
        parallelize, data_parallel_size=args.ranks, tensor_parallel_size=1
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
    for step in range(args.steps):
        tokens = batch(step, fabric.global_rank, fabric.device)
        loss = loss_of(model(tokens), tokens)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    metrics = tagc.compressor(model.module).metrics()
    ratio = metrics.dense_bytes / metrics.wire_bytes
    fabric.print(f"loss {loss.item():.6f}, {ratio:.1f} times fewer gradient bytes")


if __name__ == "__main__":
    main()
