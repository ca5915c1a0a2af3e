"""Sites that train apart: exchange changes of parameters once in many steps, save, resume.

torchrun --standalone --nproc-per-node 2 examples/recipes/sites.py --checkpoint runs/sites
torchrun --standalone --nproc-per-node 2 examples/recipes/sites.py --plot runs/sites.png

The second one also trains with gradients averaged in every step, and draws loss over bytes.

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
from torch.nn.parallel import DistributedDataParallel

import tagc


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--policy", default="sites")
    parser.add_argument("--checkpoint", type=Path, help="saved here at the end, resumed from here")
    parser.add_argument("--plot", type=Path, help="loss over bytes, beside synchronous training")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    site = dist.get_rank()
    torch.manual_seed(0)  # all sites begin alike
    model = Reverser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sites = tagc.sites(model, optimizer, policy=args.policy)

    curve = []  # bytes sent, and loss
    step = load(args.checkpoint, sites, model, optimizer) if args.checkpoint else 0
    while step < args.steps:
        tokens = batch(step, site)
        loss = loss_of(model(tokens), tokens)
        loss.backward()
        optimizer.step()  # and, when it is due, an exchange
        optimizer.zero_grad()
        step += 1
        curve.append((sites.metrics().wire_bytes, loss.item()))
        if site == 0 and step % 16 == 0:
            print(f"step {step}, loss {loss.item():.6f}, sent {sites.metrics().wire_bytes:,} bytes")
    if args.checkpoint:
        save(args.checkpoint, sites, model, optimizer, step)
    if site == 0:
        print(sites.metrics())
    if args.plot:
        plot(args.plot, {"sites": curve, "synchronous": synchronous(args.steps)})
    dist.destroy_process_group()


def synchronous(steps: int) -> list[tuple[int, float]]:
    """Bytes and losses of a model whose gradients are averaged in every step."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Reverser())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # An all-reduce sends this rank's share of a reduce-scatter and of an all-gather.
    ranks = dist.get_world_size()
    each = 2 * 4 * sum(p.numel() for p in model.parameters()) * (ranks - 1) // ranks
    curve = []
    for step in range(steps):
        tokens = batch(step, dist.get_rank())
        loss = loss_of(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        curve.append(((step + 1) * each, loss.item()))
    return curve


def plot(file: Path, curves: dict[str, list[tuple[int, float]]]) -> None:
    if dist.get_rank():
        return
    import matplotlib.pyplot as plt

    _, axes = plt.subplots()
    for name, curve in curves.items():
        sent, losses = zip(*(point for point in curve if point[0]), strict=True)
        axes.plot(sent, losses, label=name, drawstyle="steps-post")
    axes.set(xscale="log", yscale="log", xlabel="bytes that a rank sent", ylabel="loss")
    axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    plt.savefig(file)
    print(f"see {file}")


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
