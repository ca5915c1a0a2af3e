"""Sites that train apart: exchange changes of parameters once in many steps, save, resume.

torchrun --standalone --nproc-per-node 2 examples/recipes/sites.py --checkpoint runs/sites

Every process is a site. If a site has several devices, shard its model by fully_shard over the
site's dimension of a mesh, and give tagc.sites the other dimension.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from task import Reverser, batch, loss_of

import tagc


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--policy", default="sites")
    parser.add_argument("--checkpoint", type=Path, help="saved here at the end, resumed from here")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    site = dist.get_rank()
    torch.manual_seed(0)  # all sites begin alike
    model = Reverser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sites = tagc.sites(model, optimizer, policy=args.policy)

    step = load(args.checkpoint, sites, model, optimizer) if args.checkpoint else 0
    while step < args.steps:
        tokens = batch(step, site)
        loss = loss_of(model(tokens), tokens)
        loss.backward()
        optimizer.step()  # and, when it is due, an exchange
        optimizer.zero_grad()
        step += 1
        if site == 0 and step % 16 == 0:
            print(f"step {step}, loss {loss.item():.6f}, sent {sites.metrics().wire_bytes:,} bytes")
    if args.checkpoint:
        save(args.checkpoint, sites, model, optimizer, step)
    if site == 0:
        print(sites.metrics())
    dist.destroy_process_group()


def save(folder: Path, sites: tagc.Sites, model: Any, optimizer: Any, step: int) -> None:
    sites.save(folder / "sites")  # what the sites agreed on, and what is still owed
    # Between exchanges every site has its own parameters, and always its own moments.
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state, folder / f"site-{dist.get_rank()}.pt")


def load(folder: Path, sites: tagc.Sites, model: Any, optimizer: Any) -> int:
    if not folder.exists():
        return 0
    sites.load(folder / "sites")
    state = torch.load(folder / f"site-{dist.get_rank()}.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


if __name__ == "__main__":
    main()
