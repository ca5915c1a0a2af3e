"""Lightning's Trainer: a strategy for FSDP2 with compression.

It is not a callback because Lightning never tells callbacks where a checkpoint goes, and only rank
0 saves what they add to it, while residuals differ from rank to rank.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from tagc.handle.compressor import attached
from tagc.handle.wrapper import wrap
from tagc.integrations.optional import missing
from tagc.integrations.sharded import load_all, remove, residual_folder, save_all, saved_folder

try:
    from lightning.pytorch.strategies import ModelParallelStrategy  # pyright: ignore
    from lightning.pytorch.trainer.states import TrainerFn  # pyright: ignore
except ImportError as error:
    raise missing("lightning", error) from error


class TagcStrategy(ModelParallelStrategy):
    """A ``ModelParallelStrategy`` that wraps the model when ``fit`` begins, after
    ``configure_model`` has sharded it. Its checkpoints contain the residuals::

        Trainer(strategy=TagcStrategy(policy="hybrid", data_parallel_size=8, ...))

    A distributed checkpoint has them in its folder ``tagc``; a single-file checkpoint has them
    beside it, in ``NAME.tagc``; a checkpoint with ``save_weights_only`` has none. A checkpoint
    without residuals is loaded with a warning.
    """

    def __init__(
        self,
        *args: Any,
        policy: Any = None,
        tagc_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            args, kwargs: arguments of ``ModelParallelStrategy``.
            policy: see :func:`tagc.wrap`.
            tagc_options: other keyword arguments of :func:`tagc.wrap`.
        """
        super().__init__(*args, **kwargs)
        self._policy, self._tagc_options = policy, dict(tagc_options or {})

    def setup(self, trainer: Any) -> None:
        """Set up as ``ModelParallelStrategy`` does; then wrap the model if ``fit`` begins.

        Raises:
            ValueError, tagc.PolicyError, RuntimeError: see :func:`tagc.wrap`.
        """
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING and attached(self._wrapped) is None:
            wrap(self._wrapped, self._policy, **self._tagc_options)

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | os.PathLike[str],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Save as ``ModelParallelStrategy`` does, and the residuals; on all ranks."""
        resumable = "optimizer_states" in checkpoint
        super().save_checkpoint(checkpoint, filepath, *args, **kwargs)
        if resumable:
            folder = residual_folder(
                self.broadcast(filepath), distributed=self._save_distributed_checkpoint
            )
            save_all({"model": self._wrapped}, folder)

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Load as ``ModelParallelStrategy`` does, and the residuals; on all ranks."""
        loaded = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        load_all({"model": self._wrapped}, saved_folder(self.broadcast(checkpoint_path)))
        return loaded

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Remove the checkpoint as ``ModelParallelStrategy`` does, and the residuals."""
        folder = saved_folder(filepath)  # depends on the checkpoint, so find it first
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            remove(folder)

    @property
    def _wrapped(self) -> nn.Module:
        assert self.model is not None
        return self.model
