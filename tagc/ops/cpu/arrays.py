"""Tensors as the numpy arrays that the kernels take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def numpy_of(t: Tensor | None) -> Any:
    """A view for numba: bfloat16 as unsigned integers."""
    if t is None:
        return None
    if t.dtype == torch.bfloat16:
        return t.view(torch.uint16).numpy()
    return t.numpy()


def words_of(t: Tensor) -> Any:
    """int32 words as unsigned ones."""
    return t.view(torch.uint32).numpy()


def halves_of(t: Tensor) -> Any:
    """int32 words as twice as many halves, the low one first."""
    return t.view(torch.uint16).numpy()


def rows_of(t: Tensor) -> tuple[Any, int]:
    """The memory under ``[R, words]``, one array from the first row's begin to the last one's end,
    and the distance of rows in it: a row of a two-dimensional array is not known to be contiguous.
    """
    rows, words = t.shape
    distance = t.stride(0) if rows > 1 else words
    return words_of(t.as_strided((max(0, rows - 1) * distance + words,), (1,))), distance
