"""Scratch buffers. All units share them, if they work one after another, on one stream."""

from __future__ import annotations

import torch
from torch import Tensor


class Workspace:
    """Named buffers, which grow to the largest use and are reused."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[str, torch.dtype, int], Tensor] = {}

    def clear(self) -> None:
        """Free all buffers."""
        self._buffers.clear()

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A buffer of this shape. It still holds its last user's content."""
        numel = 1
        for size in shape:
            numel *= size
        # Separate FSDP roots reduce on separate streams, and may overlap.
        cuda = self._device.type == "cuda"
        stream = torch.cuda.current_stream(self._device).cuda_stream if cuda else 0
        buffer = self._buffers.get((name, dtype, stream))
        if buffer is None or buffer.numel() < numel:
            # Training cannot write to a tensor that an evaluation made in inference mode.
            with torch.inference_mode(False):
                buffer = torch.empty(numel, dtype=dtype, device=self._device)
            self._buffers[name, dtype, stream] = buffer
        return buffer[:numel].view(shape)
