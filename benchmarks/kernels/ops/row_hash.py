"""Baseline: a sketch that hashes rows of 1024 lanes as a whole, in the manner of LHC.

From the published description (arXiv 2402.07529): a block of 1024 elements is one row, added with
three hashes and signs into one table of such rows, so that every lane is a tiny sketch of its own;
six atomic additions per element to peel, zero or not; the host reads a flag after every round.
Written in eager torch (``index_add_`` is an atomic addition per element on a GPU), and given what
costs the original time: positions and signs are drawn beforehand, and the index is a bool mask
that is neither packed nor sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .inputs import Inputs, difference

_LANES, _HASHES = 1024, 3
# The published benchmark's: a tenth of the elements as cells, at 95% sparsity.
_CELLS_PER_KEY = 2.0


class RowHash:
    """Codec of the elements above a threshold; lossy wherever a lane's sketch does not peel."""

    def __init__(self, data: Inputs) -> None:
        n, density = data.case.numel, data.case.density
        assert density is not None
        if n % _LANES:
            raise ValueError(f"{n} elements are not a multiple of {_LANES}")
        self._data, self._rows = data, n // _LANES
        table_rows = max(_HASHES, math.ceil(_CELLS_PER_KEY * density * self._rows))
        device, draw = data.grad.device, torch.Generator().manual_seed(0)
        where = torch.randint(table_rows, (_HASHES, self._rows), generator=draw)
        sign = torch.randint(2, (_HASHES, self._rows, 1), generator=draw) * 2.0 - 1
        self._where, self._sign = where.to(device), sign.to(device)
        self._table = torch.zeros(table_rows, _LANES, device=device)
        self._mask = torch.zeros(self._rows, _LANES, dtype=torch.bool, device=device)
        self.note = f"{_CELLS_PER_KEY:g} cells per key"
        self.details: dict[str, float] = {}

    def encode(self, grad: Tensor, residual: Tensor) -> None:
        """Table and mask of the elements to send, and the new residual ``[n]``."""
        x = grad.float() + residual.float()
        mask = x.abs() >= self._data.element_threshold
        sent = torch.where(mask, x, 0.0).view(self._rows, _LANES)
        self._mask = mask.view(self._rows, _LANES)
        self._table.zero_()
        self._add(self._table, lambda i: sent * self._sign[i])
        residual.copy_(torch.where(mask, 0.0, x))

    def decode(self, out: Tensor) -> Tensor:
        """Peel in rounds into ``out`` ``[n]``, 0 where that fails; number of such elements."""
        left, degree = self._table.clone(), torch.zeros_like(self._table, dtype=torch.int32)
        todo, one = self._mask.clone(), self._mask.int()
        self._add(degree, lambda i: one)
        values = torch.zeros(self._rows, _LANES, device=out.device)
        while True:
            found, value = torch.zeros_like(todo), torch.zeros_like(values)
            for i in range(_HASHES):
                alone = (degree[self._where[i]] == 1) & todo & ~found
                value = torch.where(alone, left[self._where[i]] * self._sign[i], value)
                found |= alone
            if not found.any():  # the host waits for this flag in every round
                break
            gone = found.int()
            self._add(left, lambda i, value=value: -value * self._sign[i])
            self._add(degree, lambda i, gone=gone: -gone)
            todo &= ~found
            values += value
        out.copy_(values.view(-1))
        return todo.sum()

    def check(self, out: Tensor, unrecovered: Tensor) -> str | None:
        """How much of what was sent did not come back; None if all of it did."""
        share = float(unrecovered) / max(1, int(self._mask.sum()))
        self.details = {"unrecovered": share}
        if share:
            return f"leaves {100 * share:.2g}% of the kept elements unrecovered"
        sent = torch.where(self._mask.view(-1), self._data.x, 0.0)
        # float32 sums round in every addition to a cell; the shard in its dtype.
        tolerance = 1e-3 + sent.abs() * 2.0**-8
        return difference(out, sent, tolerance, "what came back is not what was sent")

    def _add(self, table: Tensor, rows: Callable[[int], Tensor]) -> None:
        for i in range(_HASHES):
            table.index_add_(0, self._where[i], rows(i))
