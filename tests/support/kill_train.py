"""A training script that resumes from its last checkpoint, and kills itself on request.

``torchrun --max-restarts N tests/support/kill_train.py FOLDER --kills RANK:STEP ...``, one kill for
each of the first incarnations, in the middle of that step's backward.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import tagc

STEPS, EVERY = 10, 3
CODECS: dict[str, dict[str, Any]] = {
    "sketch": {"kind": "sketch", "density": 0.3, "warmup_steps": 2},
    "shared": {"kind": "sketch", "density": 0.3, "symbol": "int32x1", "support": "shared"},
    "quantized": {"kind": "quantized", "bits": 4},
}
CHANGES = {"kind": "delta", "bits": 4}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Three units; ``killer`` is called in the middle of a backward, after the last one's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(17) for _ in range(3))
        self.killer: Any = None

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            if i == 2 and self.killer is not None:
                x.register_hook(self.killer)
            x = block(x)
        return x


def train(
    rank: int,
    folder: Path,
    codec: str,
    saver: str,
    kill: tuple[int, int] | None,
    hosts: int | None = None,
    ddp: bool = False,
) -> dict:
    """Train from the last checkpoint to the end; return this rank's weights.

    Args:
        kill: rank and step.
        hosts: ranks that share a host; then changes of parameters are sent.
        ddp: whether the model is replicated instead of sharded.
    """
    net = Net()
    model: Any = net
    if ddp:
        model = DistributedDataParallel(net, bucket_cap_mb=0.01)
    else:
        for block in net.blocks:
            fully_shard(block)
        fully_shard(net)
    when = {"name": "*.weight"}
    policy: dict[str, Any] = {"schema": 1, "gradients": [{"when": when, "codec": CODECS[codec]}]}
    if hosts and not ddp:
        policy["parameters"] = [{"when": when, "codec": CHANGES}]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a model this small may send more when compressed
        tagc.wrap(model, policy, hosts=hosts)
    assert {u.info.ranks_per_host for u in tagc.compressor(model).plan().units} == {hosts or 1}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    first = resume(folder, model, optimizer, saver)
    for step in range(first, STEPS):
        if kill == (rank, step):
            net.killer = partial(die, folder / f"killed-{rank}-{step}")
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(8, 17, generator=generator)
        (model(x) - x.flip(1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % EVERY == 0:
            checkpoint(folder, step + 1, model, optimizer, saver)
    weights: dict[str, Any] = dict(model.named_parameters())
    return {name: local(weight).detach().clone() for name, weight in weights.items()}


def local(weight: Any) -> Tensor:
    """This rank's part."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def die(note: Path, grad: Tensor) -> None:
    """End this process at once, after recording that it did."""
    note.touch()
    os.kill(os.getpid(), signal.SIGKILL)


def checkpoint(folder: Path, step: int, model: Any, optimizer: Any, saver: str) -> None:
    """Save everything, then mark it as the last checkpoint."""
    there = folder / f"step-{step}"
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments}
    if saver == "dcp":
        state["tagc"] = tagc.compressor(model)
    else:
        tagc.compressor(model).save(there)
    dcp.save(state, checkpoint_id=there)
    if dist.get_rank() == 0:
        (folder / "last.partial").write_text(there.name)
        os.replace(folder / "last.partial", folder / "last")


def resume(folder: Path, model: Any, optimizer: Any, saver: str) -> int:
    """Load the last checkpoint, if there is one; return the step after which it was saved."""
    if not (folder / "last").exists():
        return 0
    there = folder / (folder / "last").read_text()
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments}
    if saver == "dcp":
        state["tagc"] = tagc.compressor(model)
    else:
        tagc.compressor(model).load(there)
    dcp.load(state, checkpoint_id=there)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return int(there.name.removeprefix("step-"))


def main() -> None:
    """Run one incarnation."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--codec", choices=CODECS, default="sketch")
    parser.add_argument("--saver", choices=("dcp", "safetensors"), default="dcp")
    parser.add_argument("--hosts", type=int, help="ranks that share a host")
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--kills", nargs="*", default=[], metavar="RANK:STEP")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, incarnation = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    kill = None
    if incarnation < len(args.kills):
        victim, step = args.kills[incarnation].split(":")
        kill = int(victim), int(step)
    weights = train(rank, args.folder, args.codec, args.saver, kill, args.hosts, args.ddp)
    torch.save(weights | {"incarnation": incarnation}, args.folder / f"weights-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
