"""Hugging Face Accelerate: wraps the model that ``prepare`` sharded with FSDP2, or put into DDP.

This module does not import Accelerate; it calls methods of the ``accelerator``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from tagc.handle.compressor import attached
from tagc.handle.wrapper import wrap as wrap_model
from tagc.integrations.residuals import FOLDER, load_residuals, save_residuals

Model = TypeVar("Model", bound=nn.Module)


def wrap(
    accelerator: Any, model: Model, policy: Any = None, *, folder: str = FOLDER, **options: Any
) -> Model:
    """:func:`tagc.wrap` for a model that ``accelerator.prepare`` returned. From now on,
    ``accelerator.save_state`` saves its residuals and ``accelerator.load_state`` loads them.

    (``register_for_checkpointing`` would save only the residuals of rank 0.) A checkpoint without
    residuals is loaded with a warning.

    Args:
        accelerator: an ``Accelerator`` with ``FullyShardedDataParallelPlugin(fsdp_version=2)``, or
            one that takes DDP.
        folder: the residuals' folder inside the checkpoint; give each model its own.
        policy, options: see :func:`tagc.wrap`.

    Raises:
        ValueError, tagc.PolicyError, RuntimeError: see :func:`tagc.wrap`.
    """
    wrap_model(model, policy, **options)

    def save(models: Any, weights: Any, checkpoint: str) -> None:
        if attached(model) is not None:  # not removed since
            save_residuals(model, Path(checkpoint) / folder)

    def load(models: Any, checkpoint: str) -> None:
        if attached(model) is not None:
            load_residuals(model, lambda: Path(checkpoint) / folder)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return model
