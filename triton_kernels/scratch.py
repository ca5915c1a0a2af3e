"""Buffers between kernels, allocated once and kept.

The key holds the stream, so that calls on two streams never share a buffer; calls on one stream
are ordered anyway. A CUDA graph captured on a stream of its own gets buffers in its own pool;
graphs captured on the same stream share them, so replay those one after another.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

_BUFFERS: dict[tuple[str, tuple[int, ...], torch.device, int, Hashable], Tensor] = {}


def buffer(
    purpose: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    layout: Hashable,
) -> Tensor:
    """A buffer with arbitrary content, the same one for the same arguments and stream."""
    if device.type == "meta":  # nothing runs, see :func:`.jit.compiling_only`
        return torch.empty(shape, dtype=dtype, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = (purpose, shape, device, stream, layout)
    found = _BUFFERS.get(key)
    if found is None:
        found = _BUFFERS[key] = torch.empty(shape, dtype=dtype, device=device)
    return found


def release() -> None:
    """See :meth:`tagc.ops.Ops.release`."""
    _BUFFERS.clear()
