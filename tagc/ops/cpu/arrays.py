"""Tensors as the numpy arrays that the kernels take."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

# What kernels take where no support is given.
NO_SUPPORT = np.empty(0, np.uint32)


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


def supports(bitmaps: Tensor, groups: int) -> Any:
    """Words of bitmaps ``[R, words]`` without what lies past the last group."""
    words = words_of(bitmaps)
    past = groups % 32
    if past:
        words = words.copy()
        words[:, -1] &= np.uint32((1 << past) - 1)
    return words


def rows_of(t: Tensor) -> tuple[Any, int]:
    """The memory under ``[R, words]``, one array from the first row's begin to the last one's end,
    and the distance of rows in it: a row of a two-dimensional array is not known to be contiguous.
    """
    if not t.numel():
        return words_of(t.flatten()), 0
    distance = t.stride(0)
    return words_of(t.as_strided(((len(t) - 1) * distance + t.shape[1],), (1,))), distance
