"""What the handles on a model have in common: a plan, and a state for checkpoints."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tagc.checkpoint import Source, State, from_state_dict, open_folder, save_folder, to_state_dict
from tagc.plan import Plan


class Handle(ABC):
    """A plan, and a state for checkpoints. It is ``Stateful``: put it into the state dict of
    ``torch.distributed.checkpoint`` beside model and optimizer."""

    _plan: Plan

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # The model holds its handle. A copy of the model, also a pickled one, is a plain model.
        return type(None), ()

    def plan(self) -> Plan:
        """The plan for every parameter. Print it to read it."""
        return self._plan

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's state between two steps: copies on the host of all residuals, by parameter,
        and of everything else that determines the next step. Waits for the device; no collective.

        All values are tensors. Their names contain the number of ranks, policy, plan and rank,
        because ``torch.distributed.checkpoint`` treats tensors with equal names on several ranks as
        copies of one.

        Raises:
            ValueError: if the state does not support the way in which a parameter is sharded.
            RuntimeError: if gradients of micro-batches wait inside hosts or replicas.
        """
        state = self._state()
        return to_state_dict(state.header(), *state.take())

    def load_state_dict(self, state_dict: Mapping[str, Any], *, force: bool = False) -> None:
        """Continue from ``state_dict``, taken by the same rank of the same number of ranks. Call it
        on all ranks.

        Args:
            force: also load a state of another policy, and drop the parts that do not fit.

        Raises:
            tagc.StateError: if the state is not valid, is of another policy or another number of
                ranks (see :meth:`load`), or part of it would be dropped. Nothing has changed then.
            RuntimeError: if that happened on another rank, or the ranks' states differ.
        """
        self._load(lambda: from_state_dict(state_dict), force=force)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the state to a folder that all ranks share: one safetensors file per rank, with
        policy, plan, step and ranks as metadata. Call it on all ranks, between two steps.

        The previous save stays valid until all files are complete.

        Raises:
            OSError: if writing fails.
            tagc.StateError: if the ranks do not share the folder.
            RuntimeError: if that happened on another rank.
        """
        save_folder(Path(folder), self._state())

    def load(
        self, folder: str | os.PathLike[str], *, key: str = "tagc", force: bool = False
    ) -> None:
        """Load a state from a folder that :meth:`save` or ``torch.distributed.checkpoint`` wrote,
        on any number of ranks. Call it on all ranks.

        With the same ranks and plan the run continues as if it had never stopped. Otherwise the
        residuals of every parameter are redistributed and keep their sum over ranks; thresholds and
        counters start again.

        Args:
            key: the compressor's key in the state dict of a ``torch.distributed.checkpoint``.
            force: also load a state of another policy, and drop, with a warning, the parts that do
                not fit.

        Raises:
            tagc.StateError: if there is no valid state, it is of another policy, or part of it
                would be dropped. Nothing has changed then.
            RuntimeError: if that happened on another rank, or the ranks' states differ.
        """
        self._load(lambda: open_folder(Path(folder), key), force=force)

    @abstractmethod
    def _state(self) -> State:
        """The state of this rank."""

    def _load(self, open_source: Callable[[], Source], *, force: bool) -> None:
        self._state().load(open_source, force=force)
