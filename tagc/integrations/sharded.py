"""What the strategies for Lightning Fabric and for Lightning's Trainer share."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from tagc.handle.compressor import attached
from tagc.integrations.residuals import FOLDER, load_residuals, save_residuals


class Compressing:
    """What tagc adds to a strategy of Lightning's, which comes after it among the bases."""

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
