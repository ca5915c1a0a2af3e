"""A training script that resumes from its last checkpoint, and kills itself on request.

``PYTHONPATH=tests torchrun --max-restarts N tests/support/kill_train.py FOLDER --kills RANK:STEP
...``, one kill for each of the first incarnations, in the middle of that step's backward.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import tagc
from support.layouts import Layout
from support.small_net import local_weights, loss_of
from support.states import POLICIES, SAVERS

STEPS, EVERY = 10, 3


def train(
    rank: int, folder: Path, layout: Layout, policy: str, saver: str, kill: tuple[int, int] | None
) -> dict[str, Any]:
    """Train from the last checkpoint to the end; return this rank's weights.

    Args:
        kill: rank and step.
    """
    model = layout.wrapped(POLICIES[policy])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(resume(folder, model, optimizer, saver), STEPS):
        if kill == (rank, step):
            norm = (model.module if layout.api == "DDP" else model).norm
            note = folder / f"killed-{rank}-{step}"
            norm.register_forward_hook(lambda *args, note=note: kill_in_backward(args[2], note))
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % EVERY == 0:
            checkpoint(folder, step + 1, model, optimizer, saver)
    return local_weights(model)


def kill_in_backward(activation: Tensor, note: Path) -> None:
    """End this process as soon as the activation has its gradient, after the last unit's."""
    activation.register_hook(partial(die, note))


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
    parser.add_argument("--api", choices=("FSDP2", "DDP"), required=True)
    parser.add_argument("--policy", choices=POLICIES, required=True)
    parser.add_argument("--saver", choices=SAVERS, required=True)
    parser.add_argument("--per-host", type=int, help="ranks that share a host")
    parser.add_argument("--kills", nargs="*", default=[], metavar="RANK:STEP")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, incarnation = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    kill = None
    if incarnation < len(args.kills):
        victim, step = args.kills[incarnation].split(":")
        kill = int(victim), int(step)
    layout = Layout(dist.get_world_size(), args.api, per_host=args.per_host)
    weights = train(rank, args.folder, layout, args.policy, args.saver, kill)
    torch.save(weights | {"incarnation": incarnation}, args.folder / f"weights-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
