"""Count bytes of tensors: temporary ones while they live, and kept ones."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tagc


class LiveBytes(TorchDispatchMode):
    """Inside, count the storages that operations make, until nothing holds them.

    Attributes:
        peak: the most bytes alive at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._held: dict[int, list[int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if not isinstance(t, Tensor):
                continue
            key = _storage(t)
            if key in given and key not in self._held:
                continue  # a view of an older storage
            if key not in self._held:
                self._held[key] = [0, t.untyped_storage().nbytes()]
                self._now += self._held[key][1]
                self.peak = max(self.peak, self._now)
            self._held[key][0] += 1
            weakref.finalize(t, self._drop, key)
        return out

    def _drop(self, key: int) -> None:
        self._held[key][0] -= 1
        if not self._held[key][0]:
            self._now -= self._held.pop(key)[1]


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def peak_of(call: Any) -> int:
    """Peak bytes of a call's tensors."""
    with torch.no_grad(), LiveBytes() as live:
        call()
    return live.peak


def stored_bytes(model: Any) -> int:
    """Bytes of all tensors that a rank keeps between steps and that the plan counts."""
    compressor = tagc.compressor(model)
    total = 0
    for reducer in (*compressor.reducers, *compressor.replica_reducers):
        for stored in (reducer.residuals, reducer.owner_residuals, reducer.owner_states):
            total += sum(tensor.nbytes for tensor in stored.values())
    for gatherer in compressor.gatherers:
        total += sum(t.nbytes for name, t in gatherer.store if name in ("copy", "kept_message"))
    return total
