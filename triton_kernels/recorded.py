"""Operators that record their launches, which can then be started without Triton's look-ups.

``kernel[grid](...)`` binds arguments, derives what the kernel is specialized on, and looks it up:
most of the host's time of a launch. A program calls an operator again and again with the same
layouts, mostly at the same addresses. So a call records compiled kernels, grids and arguments, with
tensors as addresses. The program starts them later, after it has moved addresses with its tensors.
Kernels are specialized on addresses that are multiples of 16: if that has changed, the program
calls the operator again.

A recorded operator does nothing but launches and :func:`.jit.torch_call`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from .jit import recording


class Recorded:
    """See :class:`tagc.ops.implementations.RecordedLaunches`."""

    def __init__(self, operator: Callable[..., object]) -> None:
        self._operator = operator
        self.ready = False
        self.places: dict[int, list[tuple[list[Any], int]]] = {}
        self.tied: list[tuple[int, int | None]] = []
        self._starts: list[tuple[Callable[..., object], list[Any], bool]] = []
        # Tensors of its own, whose addresses are arguments.
        self._held: list[Tensor] = []

    def starts(self, stream: int) -> Iterator[tuple[Callable[..., object], list[Any]]]:
        """See :class:`tagc.ops.implementations.RecordedLaunches`."""
        for start, arguments, launch in self._starts:
            yield partial(start, stream=stream) if launch else start, arguments

    def __call__(self, *args: Any) -> None:
        """Run the operator, and record its launches."""
        with recording() as calls:
            self._operator(*args)
        tensors = {i: x for i, x in enumerate(args) if isinstance(x, Tensor)}
        spans = {i: range(x.data_ptr(), _end(x)) for i, x in tensors.items()}
        self._starts, self.places, self._held = [], {}, []
        self.tied = [
            (i, j)
            for (i, a), (j, b) in combinations(spans.items(), 2)
            if a.start < b.stop and b.start < a.stop
        ]
        for call in calls:
            arguments = list(call.arguments)
            for place, x in enumerate(call.arguments):
                if not isinstance(x, Tensor):
                    continue
                number = next((i for i, span in spans.items() if x.data_ptr() in span), None)
                if call.launch:
                    arguments[place] = x.data_ptr()
                if number is None:
                    self._held.append(x)
                elif call.launch:
                    self.places.setdefault(number, []).append((arguments, place))
                else:  # a view, which cannot move
                    self.tied.append((number, None))
            self._starts.append((call.start, arguments, call.launch))
        # A CUDA graph that is being captured has buffers of its own: see scratch.py.
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        self.ready = bool(calls) and not capturing


def _end(x: Tensor) -> int:
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr() + (last + 1) * x.element_size() if x.numel() else x.data_ptr()
