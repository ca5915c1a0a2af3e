"""Buffers between kernels, allocated once and kept.

The key holds the stream, so that calls on two streams never share a buffer; calls on one stream
are ordered anyway.

While a stream captures a CUDA graph nothing is kept, and nothing that was kept is used. Buffers
come from the graph's own memory then, as all temporaries of a capture do: torch keeps that as long
as the graph lives, and later operators of the same capture may get it again, in their order. So a
graph shares no buffer with calls outside of it or with another graph, and may be replayed on any
stream, whatever was released meanwhile.
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
    """A buffer with arbitrary content, the same one for the same arguments and stream.

    One of its own in a capture, which lives as long as the caller holds it. ``device`` is the
    current one, see :mod:`.device`.
    """
    cuda = device.type == "cuda"
    # On ``meta`` nothing runs, see :func:`.jit.compiling_only`.
    if device.type == "meta" or (cuda and torch.cuda.is_current_stream_capturing()):
        return torch.empty(shape, dtype=dtype, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream if cuda else 0
    key = (purpose, shape, device, stream, layout)
    found = _BUFFERS.get(key)
    if found is None:
        found = _BUFFERS[key] = torch.empty(shape, dtype=dtype, device=device)
    return found


def release() -> None:
    """See :meth:`tagc.ops.Ops.release`: lets go of the buffers of all streams. Graphs have none of
    them."""
    _BUFFERS.clear()
