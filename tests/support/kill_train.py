"""A training script that resumes from its last checkpoint, and kills itself on request.

``PYTHONPATH=tests torchrun --max-restarts N tests/support/kill_train.py FOLDER RANK:STEP ...``, one
kill for each of the first incarnations, in the middle of that step's backward.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import tagc
from support.small_net import local_weights, loss_of
from support.states import POLICIES, wrapped

STEPS, EVERY = 10, 3


def train(rank: int, folder: Path, kill: tuple[int, int] | None = None) -> dict[str, Tensor]:
    """Train from the last checkpoint to the end; return this rank's weights.

    Args:
        kill: rank and step.
    """
    model = wrapped(POLICIES["sketch shared"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(resume(folder, model, optimizer), STEPS):
        if kill == (rank, step):
            # As soon as the activation has its gradient, after the last unit's.
            note = folder / f"killed-{rank}-{step}"
            model.norm.register_forward_hook(dying(note))
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % EVERY == 0:
            checkpoint(folder, step + 1, model, optimizer)
    return local_weights(model)


def dying(note: Path) -> Any:
    """A hook of a forward, whose backward then ends this process, after recording that it did."""

    def die(grad: Tensor) -> None:
        note.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def hook(module: Any, args: Any, out: Tensor) -> None:
        out.register_hook(die)

    return hook


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "tagc": tagc.compressor(model)}


def checkpoint(folder: Path, step: int, model: Any, optimizer: Any) -> None:
    """Save everything, then mark it as the last checkpoint."""
    there = folder / f"step-{step}"
    dcp.save(state_of(model, optimizer), checkpoint_id=there)
    if dist.get_rank() == 0:
        (folder / "last.partial").write_text(there.name)
        os.replace(folder / "last.partial", folder / "last")


def resume(folder: Path, model: Any, optimizer: Any) -> int:
    """Load the last checkpoint, if there is one; return the step after which it was saved."""
    if not (folder / "last").exists():
        return 0
    there = folder / (folder / "last").read_text()
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=there)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return int(there.name.removeprefix("step-"))


def main(folder: Path, *kills: str) -> None:
    """Run one incarnation."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, incarnation = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    kill = None
    if incarnation < len(kills):
        victim, step = kills[incarnation].split(":")
        kill = int(victim), int(step)
    weights = train(rank, folder, kill)
    torch.save(weights | {"incarnation": incarnation}, folder / f"weights-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
