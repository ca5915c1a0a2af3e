"""Saves residuals with the checkpoint of a trainer that does not know them.

Residuals differ from rank to rank, but trainers save foreign state only on rank 0. So residuals go
into their own folder inside the trainer's checkpoint, one file per rank.
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
    """Write the state of a wrapped model. Call it on all ranks, between two steps.

    Raises:
        OSError, tagc.StateError, RuntimeError: see :meth:`tagc.Compressor.save`.
    """
    compressor(model).save(folder)


def load_residuals(model: nn.Module, find: Callable[[], Path]) -> bool:
    """Load the state that :func:`save_residuals` wrote. Call it on all ranks. If the folder does
    not exist, as in a checkpoint of training without tagc, it loads nothing and warns.

    Args:
        find: returns the folder. If it raises on one rank, all ranks raise.

    Returns:
        Whether the folder exists.

    Raises:
        tagc.StateError: see :meth:`tagc.Compressor.load`.
        RuntimeError: see :meth:`tagc.Compressor.load`; or if only some ranks see the folder.
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
        handle.refresh()  # the trainer has loaded weights, by no optimizer
        warn(
            f"{folder} does not exist, as in a checkpoint of training without tagc: residuals "
            "keep their values, which are zero before the first step"
        )
    return found
