"""Hugging Face Accelerate: the model that ``prepare`` sharded with FSDP2, and its checkpoints.

Nothing here imports Accelerate: an ``accelerator`` is used by its methods.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from tagc.handle.wrapper import wrap as wrap_model
from tagc.integrations.residuals import FOLDER, load_residuals, save_residuals

Model = TypeVar("Model", bound=nn.Module)


def wrap(
    accelerator: Any, model: Model, policy: Any = None, *, folder: str = FOLDER, **options: Any
) -> Model:
    """:func:`tagc.wrap` for what ``accelerator.prepare`` returned, whose residuals
    ``accelerator.save_state`` saves from now on, and ``accelerator.load_state`` loads.

    (``register_for_checkpointing`` would save those of rank 0 only.) A checkpoint without residuals
    is loaded with a warning.

    Args:
        accelerator: with a ``FullyShardedDataParallelPlugin(fsdp_version=2)``.
        folder: in the checkpoint, for the residuals; another one for every further model.
        policy, options: see :func:`tagc.wrap`.

    Raises:
        ValueError, tagc.PolicyError, RuntimeError: see :func:`tagc.wrap`.
    """
    wrap_model(model, policy, **options)

    def save(models: Any, weights: Any, checkpoint: str) -> None:
        save_residuals(model, Path(checkpoint) / folder)

    def load(models: Any, checkpoint: str) -> None:
        load_residuals(model, lambda: Path(checkpoint) / folder)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return model
