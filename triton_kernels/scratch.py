"""Buffers between kernels, allocated once and kept.

The key contains the stream, so calls on two streams never share a buffer; calls on one stream are
ordered.

While a stream captures a CUDA graph, no buffer is kept, and kept buffers are not used. Buffers then
come from the graph's own memory, like all temporaries of a capture. torch keeps this memory as long
as the graph lives, and later operators of the same capture may reuse it, in order. So a graph
shares no buffer with calls outside it or with another graph. It may be replayed on any stream, even
after a release.
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

    In a capture it is a new one, which lives as long as the caller holds it. ``device`` is the
    current one, see :func:`.jit.on_device_of`.
    """
    cuda = device.type == "cuda"
    # Nothing runs on ``meta``, see :func:`.jit.compiling_only`.
    if device.type == "meta" or (cuda and torch.cuda.is_current_stream_capturing()):
        return torch.empty(shape, dtype=dtype, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream if cuda else 0
    key = (purpose, shape, device, stream, layout)
    found = _BUFFERS.get(key)
    if found is None:
        found = _BUFFERS[key] = torch.empty(shape, dtype=dtype, device=device)
    return found


def release() -> None:
    """See :meth:`tagc.ops.Ops.release`: frees the buffers of all streams, but not of graphs."""
    _BUFFERS.clear()
