"""Lightning Fabric: strategies for FSDP2 and for DDP with compression."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from tagc.handle.compressor import attached
from tagc.handle.wrapper import wrap
from tagc.integrations.residuals import Compressing, missing

try:
    from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy  # pyright: ignore
    from lightning.fabric.strategies.parallel import ParallelStrategy  # pyright: ignore
except ImportError as error:
    raise missing("lightning", error) from error


class _Compressing(Compressing, ParallelStrategy):
    def setup_module(self, module: nn.Module) -> nn.Module:
        """Set up the model, and wrap it. (Wrapping in ``parallelize_fn`` would be too early: a
        model on the meta device gets its memory later.)

        Raises:
            ValueError, tagc.PolicyError, RuntimeError: see :func:`tagc.wrap`.
        """
        return wrap(super().setup_module(module), self._policy, **self._tagc_options)

    def save_checkpoint(
        self, path: str | os.PathLike[str], state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Save as Lightning's strategy does, and the residuals; on all ranks."""
        super().save_checkpoint(path, state, *args, **kwargs)
        self._save_all(_modules(state), path)

    def load_checkpoint(
        self, path: str | os.PathLike[str], state: Any = None, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Load as Lightning's strategy does, and the residuals; on all ranks."""
        left = super().load_checkpoint(path, state, *args, **kwargs)
        if isinstance(state, dict):
            self._load_all(_modules(state), path)
        elif isinstance(state, nn.Module) and (handle := attached(state)) is not None:
            handle.refresh()  # only weights were loaded, by no optimizer
        return left


class TagcStrategy(_Compressing, ModelParallelStrategy):
    """A ``ModelParallelStrategy`` that wraps the models that its ``parallelize_fn`` shards. Its
    checkpoints (``fabric.save``, ``fabric.load``) contain the residuals of every wrapped model::

        Fabric(strategy=TagcStrategy(shard, policy="hybrid", data_parallel_size=8, ...))

    A distributed checkpoint has them in its folder ``tagc``; a single-file checkpoint has them
    beside it, in ``NAME.tagc``. A checkpoint without residuals is loaded with a warning.
    """


class TagcDDPStrategy(_Compressing, DDPStrategy):
    """A ``DDPStrategy`` that wraps the models that it replicates. Residuals lie beside a
    checkpoint, in ``NAME.tagc``::

        Fabric(strategy=TagcDDPStrategy(policy="hybrid"))
    """


def _modules(state: dict[str, Any]) -> dict[str, nn.Module]:
    return {name: value for name, value in state.items() if isinstance(value, nn.Module)}
