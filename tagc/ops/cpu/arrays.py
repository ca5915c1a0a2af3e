"""Converts tensors to the numpy arrays that the kernels take."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

# Passed to kernels if no support is given.
NO_SUPPORT = np.empty(0, np.uint32)


def numpy_of(t: Tensor | None) -> Any:
    """The memory of a tensor as an array for numba.

    Args:
        t: of any shape; float32, bfloat16, float16 or an integer dtype; or None.

    Returns:
        An array of the same shape and dtype; for bfloat16, its bits as uint16; for None, None.
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
    """Words of bitmaps with the bits past the last group cleared.

    Args:
        bitmaps: ``[R, words]`` int32.
        groups: number of valid bits of a row.

    Returns:
        ``[R, words]`` uint32: the same memory if all bits are valid, else a copy.
    """
    words = words_of(bitmaps)
    past = groups % 32
    if past:
        words = words.copy()
        words[:, -1] &= np.uint32((1 << past) - 1)
    return words


def rows_of(t: Tensor) -> tuple[Any, int]:
    """The memory of rows of words, which may lie apart, as one array.

    numba does not know that a row of a two-dimensional array is contiguous; a slice of this is.

    Args:
        t: ``[R, words]`` int32, with unit stride in its last dimension.

    Returns:
        ``[(R - 1) * stride + words]`` uint32, from the start of the first row to the end of the
        last one, and the stride of rows in it.
    """
    if not t.numel():
        return words_of(t.flatten()), 0
    stride = t.stride(0)
    return words_of(t.as_strided(((len(t) - 1) * stride + t.shape[1],), (1,))), stride
