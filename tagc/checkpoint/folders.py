"""Saving a state to a folder, all ranks together, and finding out what a folder holds."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from tagc.checkpoint.dcp import INDEX, CheckpointFolder
from tagc.checkpoint.files import MARKER, SafetensorsFolder, clean, commit, is_committed, write_rank
from tagc.checkpoint.format import Source, StateError
from tagc.checkpoint.state import State
from tagc.comm import agree_on, gather_by_rank


def open_folder(folder: Path, key: str) -> Source:
    """What was saved to a folder.

    Args:
        key: of the compressor in a ``torch.distributed.checkpoint``.

    Raises:
        StateError: if nothing was, or it is not valid.
    """
    if (folder / MARKER).exists():
        return SafetensorsFolder(folder)
    if (folder / INDEX).exists():
        return CheckpointFolder(folder, key)
    raise StateError(
        f"{folder}: holds no complete save: neither {MARKER}, from compressor.save, nor {INDEX}, "
        "from torch.distributed.checkpoint"
    )


def save_folder(folder: Path, state: State) -> None:
    """Write every rank's file, then make them what the folder holds.

    Raises:
        OSError: if writing fails.
        StateError: if the ranks do not share the folder.
        RuntimeError: if that happened on another rank.
    """
    rank = dist.get_rank()
    names = gather_by_rank(state.groups, {rank: uuid.uuid4().hex[:16]})
    ranks = sorted(names)
    save = names[ranks[0]]

    def step(do: Callable[[], None]) -> None:
        agree_on(
            state.groups,
            {"step": lambda: (do(), str(state.step))},
            doing="saving tagc's state",
            remedy="All ranks must save between the same two steps",
        )

    step(lambda: write_rank(folder, save, state.header(), state.take()))
    if rank == ranks[0]:
        step(lambda: commit(folder, save, ranks, dist.get_world_size()))
    else:
        step(lambda: None)

    def confirm() -> None:
        if not is_committed(folder, save):
            raise StateError(f"{folder}: rank {ranks[0]} wrote to it, but this rank sees another")

    step(confirm)
    if rank == ranks[0]:
        clean(folder, save)
