"""Scratch buffers. All units share them, if they work one after another, on one stream."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Workspace:
    """Named buffers, which grow to the largest use and are reused.

    Attributes:
        generation: how often a buffer was replaced or freed. Views taken earlier are stale then.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.generation = 0
        self._buffers: dict[tuple[str, torch.dtype, int], Tensor] = {}
        # Making a view costs the host about as much as using it, and steps take the same ones.
        self._views: dict[tuple[str, torch.dtype, int, tuple[int, ...]], Tensor] = {}

    def clear(self) -> None:
        """Free all buffers."""
        self.generation += 1
        self._buffers.clear()
        self._views.clear()

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A buffer of this shape. It still holds its last user's content."""
        # Separate FSDP roots reduce on separate streams, and may overlap.
        cuda = self._device.type == "cuda"
        stream = torch.cuda.current_stream(self._device).cuda_stream if cuda else 0
        key = name, dtype, stream
        view = self._views.get((*key, shape))
        if view is not None:
            return view
        numel = math.prod(shape)
        # Training cannot write to a tensor that an evaluation made in inference mode.
        with torch.inference_mode(False):
            buffer = self._buffers.get(key)
            if buffer is None or buffer.numel() < numel:
                self.generation += buffer is not None
                buffer = torch.empty(numel, dtype=dtype, device=self._device)
                self._buffers[key] = buffer
                # Views of the smaller buffer would keep it.
                self._views = {k: v for k, v in self._views.items() if k[:3] != key}
            view = self._views[*key, shape] = buffer[:numel].view(shape)
        return view
