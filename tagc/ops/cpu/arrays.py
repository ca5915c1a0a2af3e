"""Tensors as the numpy arrays that the kernels take."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

# What kernels take where no support is given.
NO_SUPPORT = np.empty(0, np.uint32)


def numpy_of(t: Tensor | None) -> Any:
    """The memory of a tensor as an array for numba.

    Args:
        t: of any shape; float32, bfloat16, float16 or an integer dtype; or None.

    Returns:
        An array of the same shape and dtype, of bfloat16 the bits as uint16; None of None.
    """
    if t is None:
        return None
    if t.dtype == torch.bfloat16:
        return t.view(torch.uint16).numpy()
    return t.numpy()


def words_of(t: Tensor) -> Any:
    """``[...]`` int32 words as uint32, in the same memory."""
    return t.view(torch.uint32).numpy()


def halves_of(t: Tensor) -> Any:
    """``[..., n]`` int32 words as ``[..., 2 * n]`` uint16, low halves first, in the same memory."""
    return t.view(torch.uint16).numpy()


def supports(bitmaps: Tensor, groups: int) -> Any:
    """Words of bitmaps without what lies past the last group.

    Args:
        bitmaps: ``[R, words]`` int32.
        groups: bits of a row that mean something.

    Returns:
        ``[R, words]`` uint32: the same memory if all bits mean something, else a copy.
    """
    words = words_of(bitmaps)
    past = groups % 32
    if past:
        words = words.copy()
        words[:, -1] &= np.uint32((1 << past) - 1)
    return words


def rows_of(t: Tensor) -> tuple[Any, int]:
    """The memory under rows of words that may lie apart, as one array.

    A row of a two-dimensional array is not known to be contiguous; a piece of this one is.

    Args:
        t: ``[R, words]`` int32, of unit stride in its last dimension.

    Returns:
        ``[(R - 1) * stride + words]`` uint32, from the first row's begin to the last one's end,
        and the stride of rows in it.
    """
    if not t.numel():
        return words_of(t.flatten()), 0
    stride = t.stride(0)
    return words_of(t.as_strided(((len(t) - 1) * stride + t.shape[1],), (1,))), stride
