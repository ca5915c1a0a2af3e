"""Saves residuals with the checkpoint of a trainer that does not know them.

Residuals differ from rank to rank, but trainers save foreign state only on rank 0. So residuals go
into their own folder inside the trainer's checkpoint, one file per rank. This and the error for a
missing package is what integrations share.
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
    """:meth:`tagc.Compressor.save` of a wrapped model."""
    compressor(model).save(folder)


def load_residuals(model: nn.Module, find: Callable[[], Path]) -> bool:
    """Load the state that :func:`save_residuals` wrote, on all ranks, from the folder that ``find``
    returns; all ranks raise if it raises on one, or only some see the folder. If it does not exist,
    as in a checkpoint of training without tagc, warn and return False."""
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


def missing(package: str, error: ImportError) -> ImportError:
    """The error to raise after an optional import failed. It names the command that installs the
    package; if the package is installed but broken, it is ``error`` itself."""
    if error.name is None or error.name.partition(".")[0] != package:
        return error
    return ModuleNotFoundError(
        f"tagc.integrations needs {package}, which is not installed here: pip install {package}",
        name=package,
    )
