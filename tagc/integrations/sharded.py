"""What the strategies for Lightning Fabric and for Lightning's Trainer share."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from torch import nn

from tagc.handle.compressor import attached
from tagc.integrations.residuals import FOLDER, load_residuals, save_residuals


def residual_folder(checkpoint: str | os.PathLike[str], *, distributed: bool) -> Path:
    """Where the residuals of a checkpoint are: inside of it, if it is a folder, else beside it."""
    return Path(checkpoint) / FOLDER if distributed else Path(f"{os.fspath(checkpoint)}.{FOLDER}")


def saved_folder(checkpoint: str | os.PathLike[str]) -> Path:
    """Where those of a checkpoint are that exists: it may be of another kind than those that a
    strategy saves, and Lightning, too, goes by what it finds."""
    return residual_folder(checkpoint, distributed=Path(checkpoint).is_dir())


def save_all(models: dict[str, nn.Module], folder: Path) -> None:
    """Save the residuals of those models that are wrapped, each by its name; on all ranks."""
    for name, model in models.items():
        if attached(model) is not None:
            save_residuals(model, folder / name)


def load_all(models: dict[str, nn.Module], folder: Path) -> None:
    """Load them again; on all ranks."""
    for name, model in models.items():
        if attached(model) is not None:
            load_residuals(model, lambda name=name: folder / name)


def remove(folder: Path) -> None:
    """Delete the residuals of a checkpoint that is deleted."""
    if folder.exists():
        shutil.rmtree(folder)
