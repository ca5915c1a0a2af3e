"""Lightning's Trainer: strategies for FSDP2 and for DDP with compression.

They are not callbacks because Lightning never tells callbacks where a checkpoint goes, and only
rank 0 saves what they add to it, while residuals differ from rank to rank.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

from torch import nn

from tagc.handle.compressor import Compressor, attached, compressor
from tagc.handle.wrapper import wrap
from tagc.integrations.residuals import Compressing, missing, residual_folder

try:
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy  # pyright: ignore
    from lightning.pytorch.strategies.parallel import ParallelStrategy  # pyright: ignore
    from lightning.pytorch.trainer.states import TrainerFn  # pyright: ignore
except ImportError as error:
    raise missing("lightning", error) from error


class _Compressing(Compressing, ParallelStrategy):
    _wrapped: nn.Module | None = None

    @property
    def compressor(self) -> Compressor:
        """The compressor of the model, also after ``fit``.

        Raises:
            RuntimeError: before ``fit``.
        """
        if self._wrapped is None:
            raise RuntimeError("the model is not wrapped yet: Trainer.fit wraps it")
        return compressor(self._wrapped)

    def setup(self, trainer: Any) -> None:
        """Set up as Lightning's strategy does; then wrap the model if ``fit`` begins.

        Raises:
            ValueError, tagc.PolicyError, RuntimeError: see :func:`tagc.wrap`.
        """
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING or attached(self.model) is not None:
            return
        before = None if self._wrapped is None else attached(self._wrapped)
        self._wrapped = wrap(self.model, self._policy, **self._tagc_options)
        if before is not None:  # another `fit`, for which DDP is made anew
            self.compressor.load_state_dict(before.state_dict())

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | os.PathLike[str],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Save as Lightning's strategy does, and the residuals; on all ranks."""
        resumable = "optimizer_states" in checkpoint
        super().save_checkpoint(checkpoint, filepath, *args, **kwargs)
        if resumable:
            self._save_all(self._models, filepath)

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Load as Lightning's strategy does, and the residuals; on all ranks."""
        loaded = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        self._load_all(self._models, checkpoint_path)
        return loaded

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Remove the checkpoint as Lightning's strategy does, and the residuals."""
        folder = residual_folder(filepath)  # depends on the checkpoint, so find it first
        super().remove_checkpoint(filepath)
        if self.is_global_zero and folder.exists():
            shutil.rmtree(folder)

    @property
    def _models(self) -> dict[str, nn.Module]:
        model = self.model if self._wrapped is None else self._wrapped
        assert model is not None
        return {"model": model}


class TagcStrategy(_Compressing, ModelParallelStrategy):
    """A ``ModelParallelStrategy`` that wraps the model when ``fit`` begins, after
    ``configure_model`` has sharded it. Its checkpoints contain the residuals::

        Trainer(strategy=TagcStrategy(policy="hybrid", data_parallel_size=8, ...))

    A distributed checkpoint has them in its folder ``tagc``; a single-file checkpoint has them
    beside it, in ``NAME.tagc``; a checkpoint with ``save_weights_only`` has none. A checkpoint
    without residuals is loaded with a warning.
    """


class TagcDDPStrategy(_Compressing, DDPStrategy):
    """A ``DDPStrategy`` that wraps the model when ``fit`` begins. Residuals lie beside a
    checkpoint, in ``NAME.tagc``::

        Trainer(strategy=TagcDDPStrategy(policy="hybrid"))
    """

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether a checkpoint is loaded after ``setup``: only then the model is wrapped."""
        return True
