"""The common part of the strategies for Lightning Fabric and for Lightning's Trainer."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from torch import nn

from tagc.handle.compressor import attached
from tagc.integrations.residuals import FOLDER, load_residuals, save_residuals


def residual_folder(checkpoint: str | os.PathLike[str], *, distributed: bool) -> Path:
    """The folder for a checkpoint's residuals: inside a distributed one, else beside it."""
    return Path(checkpoint) / FOLDER if distributed else Path(f"{os.fspath(checkpoint)}.{FOLDER}")


def saved_folder(checkpoint: str | os.PathLike[str]) -> Path:
    """The residuals' folder of an existing checkpoint. Like Lightning, it looks at the checkpoint,
    which may be of another kind than the strategy saves."""
    return residual_folder(checkpoint, distributed=Path(checkpoint).is_dir())


def save_all(models: dict[str, nn.Module], folder: Path) -> None:
    """Save the residuals of all wrapped models, each under its name. Call it on all ranks."""
    for name, model in models.items():
        if attached(model) is not None:
            save_residuals(model, folder / name)


def load_all(models: dict[str, nn.Module], folder: Path) -> None:
    """Load the residuals of all wrapped models. Call it on all ranks."""
    for name, model in models.items():
        if attached(model) is not None:
            load_residuals(model, lambda name=name: folder / name)


def remove(folder: Path) -> None:
    """Delete the residuals of a deleted checkpoint."""
    if folder.exists():
        shutil.rmtree(folder)
