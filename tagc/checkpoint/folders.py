"""Saves a state to a folder, all ranks together, and opens the state in a folder."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from tagc.basics.warn import warn
from tagc.checkpoint.dcp import INDEX, CheckpointFolder
from tagc.checkpoint.files import (
    MARKER,
    SafetensorsFolder,
    check_save,
    clean,
    commit,
    is_committed,
    read_marker,
    remove_rank,
    write_marker,
    write_rank,
)
from tagc.checkpoint.format import DENSE, Source, StateError
from tagc.checkpoint.state import State
from tagc.collect import Meeting, gather_by_rank


def open_folder(folder: Path, key: str) -> Source:
    """Open the state that was saved to a folder.

    Args:
        key: the compressor's key in a ``torch.distributed.checkpoint``.

    Raises:
        StateError: if the folder holds no complete state, or one that is not valid.
    """
    if (folder / MARKER).exists():
        return SafetensorsFolder(folder)
    if (folder / INDEX).exists():
        return CheckpointFolder(folder, key)
    raise StateError(
        f"{folder}: holds no complete save: neither {MARKER}, from compressor.save, nor {INDEX}, "
        f"from torch.distributed.checkpoint. {DENSE}"
    )


def save_folder(folder: Path, state: State) -> None:
    """Write every rank's file, then commit them as the folder's state.

    If a step fails on any rank, all ranks raise, and the folder keeps its previous state. All ranks
    take every step together, so no rank is left waiting for another. They meet over the store of
    the process group, because a collective's watchdog might end the job while files are written.

    1. Every rank writes its file and reads it again.
    2. The committing rank, which is the first one, checks the files of all ranks in its folder.
    3. It writes the name of this save into the marker.
    4. Every rank checks that it sees this marker.

    Only then does the committing rank remove the files of earlier saves.

    Raises:
        OSError: if writing fails.
        StateError: if the ranks do not share the folder.
        RuntimeError: if that happened on another rank.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    names = gather_by_rank(state.groups, {rank: uuid.uuid4().hex[:16]})
    ranks = sorted(names)
    save, commits = names[ranks[0]], rank == ranks[0]

    meeting = Meeting(
        f"save {save}",
        ranks,
        doing="saving tagc's state",
        remedy="All ranks must save between the same two steps",
    )

    def write() -> str:
        return write_rank(folder, save, state.header(), *state.take())

    def check() -> bytes | None:
        if not commits:
            return None
        check_save(folder, save, digests, world_size)
        return read_marker(folder)

    def commit_here() -> None:
        if commits:
            commit(folder, save, ranks, world_size)

    def confirm() -> None:
        if not is_committed(folder, save):
            raise StateError(f"{folder}: rank {ranks[0]} wrote to it, but this rank sees another")

    def restore() -> None:
        if commits and read_marker(folder) != former:
            write_marker(folder, former)

    undo: Callable[[], None] = lambda: None  # noqa: E731
    try:
        digests = meeting.together(f"writing step {state.step}", write)
        former = meeting.together("checking", check)[rank]
        undo = restore
        meeting.together("committing", commit_here)
        meeting.together("confirming", confirm)
    except Exception as error:
        try:
            meeting.together("undoing", undo)
        except Exception as failure:
            # The marker may name these files, so they stay.
            error.add_note(f"the files of this save are left in {folder}: {failure}")
        else:
            remove_rank(folder, save, rank, world_size)
        raise
    if commits:
        try:
            clean(folder, save)
        except OSError as error:
            warn(f"{folder}: files of earlier saves are left in it: {error}")
