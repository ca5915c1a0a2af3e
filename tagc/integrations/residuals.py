"""Saves residuals with the checkpoint of a trainer that does not know them.

Residuals differ from rank to rank, but trainers save foreign state only on rank 0. So residuals go
into their own folder inside the trainer's checkpoint, one file per rank. This, the error for a
missing package, and what Lightning's strategies have in common, is what integrations share.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from tagc.basics.warn import warn
from tagc.collect import agree_on
from tagc.handle.compressor import attached, compressor

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


class Compressing:
    """What tagc adds to a strategy of Lightning's Fabric or Trainer, which comes after it among the
    bases."""

    broadcast: Any

    def __init__(
        self,
        *args: Any,
        policy: Any = None,
        tagc_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            args, kwargs: arguments of Lightning's strategy.
            policy: see :func:`tagc.wrap`.
            tagc_options: other keyword arguments of :func:`tagc.wrap`.
        """
        super().__init__(*args, **kwargs)
        self._policy, self._tagc_options = policy, dict(tagc_options or {})

    def _save_all(self, models: Mapping[str, nn.Module], path: str | os.PathLike[str]) -> None:
        """Save the residuals of all wrapped models, each under its name; on all ranks."""
        # Ranks may get different paths, such as names that contain the time.
        distributed = getattr(self, "_save_distributed_checkpoint", False)
        folder = residual_folder(self.broadcast(path), distributed=distributed)
        for name, model in models.items():
            if attached(model) is not None:
                save_residuals(model, folder / name)

    def _load_all(self, models: Mapping[str, nn.Module], path: str | os.PathLike[str]) -> None:
        """Load the residuals of all wrapped models; on all ranks."""
        folder = residual_folder(self.broadcast(path))
        for name, model in models.items():
            if attached(model) is not None:
                load_residuals(model, lambda name=name: folder / name)


def residual_folder(checkpoint: str | os.PathLike[str], *, distributed: bool | None = None) -> Path:
    """The folder for a checkpoint's residuals: inside a distributed one, else beside it. By default
    the checkpoint is there; like Lightning, this looks at it, because it may be of another kind
    than the strategy saves."""
    inside = Path(checkpoint).is_dir() if distributed is None else distributed
    return Path(checkpoint) / FOLDER if inside else Path(f"{os.fspath(checkpoint)}.{FOLDER}")
