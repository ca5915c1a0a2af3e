"""Plain torch: shard or replicate, wrap, train, save, resume as if nothing had happened.

torchrun --standalone --nproc-per-node 2 examples/recipes/plain.py --checkpoint runs/plain
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from task import Reverser, batch, loss_of
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tagc


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--policy", default="hybrid")
    parser.add_argument("--ddp", action="store_true", help="DDP instead of FSDP2")
    parser.add_argument("--checkpoint", type=Path, help="saved here at the end, resumed from here")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank = dist.get_rank()
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.manual_seed(0)
    model: Any = Reverser().to(device)
    if args.ddp:
        model = DistributedDataParallel(model)
    else:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    tagc.wrap(model, policy=args.policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    step = load(args.checkpoint, model, optimizer) if args.checkpoint else 0
    while step < args.steps:
        tokens = batch(step, rank, device)
        loss = loss_of(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if rank == 0 and step % 10 == 0:
            print(f"step {step}, loss {loss.item():.6f}")
    if args.checkpoint:
        save(args.checkpoint, model, optimizer, step)
    dist.destroy_process_group()


def save(folder: Path, model: torch.nn.Module, optimizer: Any, step: int) -> None:
    weights, moments = get_state_dict(model, optimizer)
    state = {
        "model": weights,
        "optimizer": moments,
        "tagc": tagc.compressor(model),  # what is still owed, and what steers the thresholds
        "step": torch.tensor(step),
    }
    dcp.save(state, checkpoint_id=folder)


def load(folder: Path, model: torch.nn.Module, optimizer: Any) -> int:
    if not (folder / ".metadata").exists():
        return 0
    weights, moments = get_state_dict(model, optimizer)
    state = {
        "model": weights,
        "optimizer": moments,
        "tagc": tagc.compressor(model),
        "step": torch.tensor(0),
    }
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return int(state["step"])


if __name__ == "__main__":
    main()
