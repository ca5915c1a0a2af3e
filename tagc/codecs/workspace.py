"""What all units share, if they work one after another, on one stream: scratch buffers, and flags,
which the host reads together."""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch
from torch import Tensor

LAG = 2
"""Assume that a GPU is at most ``LAG`` rounds behind the host, so that waiting for older rounds
takes no time."""
_PAGE = 1024


class Flags:
    """Flags on a device, which launches of one stream set, and nothing but :meth:`clear` resets.
    The host reads all of them together, ``LAG`` rounds later, so that it does not wait.

    A round ends when a flag is noted for the second time. Then one copy to the host has all flags
    as the round's launches left them. When rounds end depends on nothing that differs between
    ranks, so that all ranks see a flag in the same step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._places: dict[Hashable, tuple[int, int]] = {}
        self._views: dict[Hashable, Tensor] = {}
        self._pages: list[Tensor] = []
        self._noted: set[Hashable] = set()
        # The last copies, each with an event that tells when it is done.
        self._copies: list[tuple[list[Tensor], torch.cuda.Event]] = []
        self._rounds = self._read = 0
        self._any = False

    def take(self, owner: Hashable) -> Tensor:
        """The flag of an owner, boolean ``[1]``."""
        if owner in self._views:
            return self._views[owner]
        page, i = self._places[owner] = divmod(len(self._places), _PAGE)
        # Training cannot write to a tensor that an evaluation made in inference mode.
        with torch.inference_mode(False):
            if page == len(self._pages):
                made = torch.zeros(_PAGE, dtype=torch.bool, device=self._device)
                self._pages.append(made)
            return self._views.setdefault(owner, self._pages[page][i : i + 1])

    def note(self, owner: Hashable) -> None:
        """Note that launches may have set a flag."""
        if owner in self._noted:
            self.end_round()
        self._noted.add(owner)

    def end_round(self) -> None:
        """Copy all flags to the host, in order with the current stream. Replays of a CUDA graph
        note nothing, so a round of theirs ends here."""
        self._noted.clear()
        if len(self._copies) <= LAG:
            self._copies.append(([], torch.cuda.Event()))
        pages, copied = self._copies[self._rounds % (LAG + 1)]
        for page in self._pages[len(pages) :]:
            with torch.inference_mode(False):
                pages.append(torch.zeros_like(page, device="cpu", pin_memory=True))
        for to, page in zip(pages, self._pages, strict=True):
            to.copy_(page, non_blocking=True)
        copied.record(torch.cuda.current_stream(self._device))
        self._rounds += 1

    def seen(self, owner: Hashable) -> bool:
        """Whether an owner's flag was set, but for the last ``LAG`` rounds."""
        if self._rounds <= LAG:
            return False
        pages, copied = self._copies[self._rounds % (LAG + 1)]
        if self._read != self._rounds:
            # Wait, and don't ask whether the device is done: the answer would differ between ranks.
            copied.synchronize()
            self._read, self._any = self._rounds, any(bool(page.any()) for page in pages)
        if not self._any:
            return False
        page, i = self._places[owner]
        return page < len(pages) and bool(pages[page][i])

    def clear(self, owner: Hashable) -> None:
        """Reset a flag, because its cause was mended."""
        if self._stream is not None:
            self._stream.synchronize()  # launches and copies that are under way
        self.take(owner).zero_()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        page, i = self._places[owner]
        for pages, _ in self._copies:
            if page < len(pages):
                pages[page][i] = False


class Workspace:
    """Named buffers, which grow to the largest use and are reused.

    Attributes:
        generation: how often a buffer was replaced or freed. Views taken earlier are stale then.
        captured: whether a CUDA graph may hold addresses of buffers. From then on, buffers that are
            replaced or dropped stay allocated.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.generation = 0
        self.captured = False
        self._former: list[Tensor] = []
        self._flags: dict[int, Flags] = {}
        self._buffers: dict[tuple[str, torch.dtype, int], Tensor] = {}
        # Making a view costs the host about as much as using it, and steps take the same ones.
        self._views: dict[tuple[str, torch.dtype, int, tuple[int, ...]], Tensor] = {}

    def clear(self) -> None:
        """Free all buffers."""
        self.generation += 1
        if self.captured:
            self._former += self._buffers.values()
        self._buffers.clear()
        self._views.clear()

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A buffer of this shape. It still holds its last user's content."""
        key = name, dtype, self._stream
        view = self._views.get((*key, shape))
        if view is not None:
            return view
        numel = math.prod(shape)
        # Training cannot write to a tensor that an evaluation made in inference mode.
        with torch.inference_mode(False):
            buffer = self._buffers.get(key)
            if buffer is None or buffer.numel() < numel:
                self.generation += buffer is not None
                if self.captured and buffer is not None:
                    self._former.append(buffer)
                buffer = torch.empty(numel, dtype=dtype, device=self._device)
                self._buffers[key] = buffer
                # Views of the smaller buffer would keep it.
                self._views = {k: v for k, v in self._views.items() if k[:3] != key}
            view = self._views[*key, shape] = buffer[:numel].view(shape)
        return view

    def before_graph(self) -> None:
        """Get ready for the capture or a replay of a CUDA graph with addresses of buffers."""
        self.captured = True
        if self._device.type == "cuda":
            for flags in self._flags.values():
                flags.end_round()

    @property
    def flags(self) -> Flags:
        """The flags of the current stream."""
        stream = self._stream
        if stream not in self._flags:
            self._flags[stream] = Flags(self._device)
        return self._flags[stream]

    @property
    def _stream(self) -> int:
        # Separate FSDP roots reduce on separate streams, and may overlap.
        cuda = self._device.type == "cuda"
        return torch.cuda.current_stream(self._device).cuda_stream if cuda else 0
