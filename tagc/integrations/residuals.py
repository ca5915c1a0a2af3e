"""Residuals beside the checkpoint of a trainer that knows nothing of them.

Residuals differ from rank to rank, and trainers save what they do not know from rank 0 only. So
they go into a folder of their own inside of the trainer's checkpoint, a file a rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from torch import nn

from tagc.basics.warn import warn
from tagc.collect import agree_on
from tagc.handle.compressor import compressor

FOLDER = "tagc"


def save_residuals(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write the state of a wrapped model; on all ranks, between two steps.

    Raises:
        OSError, tagc.StateError, RuntimeError: see :meth:`tagc.Compressor.save`.
    """
    compressor(model).save(folder)


def load_residuals(model: nn.Module, find: Callable[[], Path]) -> bool:
    """Load what :func:`save_residuals` wrote; on all ranks. Without the folder, as in a checkpoint
    of training without tagc, nothing is loaded, and a warning says so.

    Args:
        find: says which folder. If it raises on one rank, all ranks raise.

    Returns:
        Whether there was something to load.

    Raises:
        tagc.StateError, RuntimeError: see :meth:`tagc.Compressor.load`; the latter, too, if only
            some ranks see the folder.
    """
    handle = compressor(model)

    def look() -> tuple[tuple[Path, bool], str]:
        folder = find()
        there = folder.exists()
        return (folder, there), f"{folder}, which {'exists' if there else 'does not exist'}"

    folder, found = agree_on(
        handle.groups,
        {"folder of residuals": look},
        doing="loading tagc's state",
        remedy="All ranks must share the folder of a checkpoint",
    )["folder of residuals"]
    if found:
        handle.load(folder)
    else:
        handle.refresh()  # the weights were loaded, which no optimizer told it
        warn(
            f"{folder} does not exist, as in a checkpoint of training without tagc: residuals stay "
            "as they are, which is zero before the first step"
        )
    return found
