"""Storage of what a rank did not send."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Residual:
    """The residual of a segment, with a row for every destination."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
        self._stored = torch.zeros(rows, columns, dtype=dtype, device=device)

    def read(self, rows: slice = slice(None)) -> Tensor:
        """``[rows, columns]``, a view."""
        return self._stored[rows]

    @contextmanager
    def opened(self, rows: slice = slice(None)) -> Iterator[Tensor]:
        """:meth:`read`, to change in place."""
        yield self.read(rows)

    def zero_(self) -> None:
        """Set the residual to zero."""
        self._stored.zero_()


@contextmanager
def opened(residual: Residual | None, rows: slice) -> Iterator[Tensor | None]:
    """See :meth:`Residual.opened`; None if there is no residual."""
    if residual is None:
        yield None
    else:
        with residual.opened(rows) as wide:
            yield wide
