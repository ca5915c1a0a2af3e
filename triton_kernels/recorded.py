"""Operators that record their launches, and start them again without Triton's look-ups.

``kernel[grid](...)`` binds arguments, derives what the kernel is specialized on, and looks it up:
most of the host's time of a launch. A program calls an operator again and again with the same
layouts, mostly at the same addresses. So the first call records compiled kernels, grids and
arguments, with tensors as addresses, and later calls start them. The caller says which tensors have
moved, and by how much. Kernels are specialized on addresses that are multiples of 16: if that has
changed, the next call records again.

A recorded operator does nothing but launches and :func:`.jit.torch_call`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from .jit import active_driver, recording

_ALIGNED = 16
_CPU = -1  # in tests


class Recorded:
    """An operator at one place in a program. In every call its tensors have the same shapes,
    strides and dtypes.

    Attributes:
        ready: whether the next call starts what is recorded, whatever its arguments.
    """

    def __init__(self, operator: Callable[..., object]) -> None:
        self._operator = operator
        self.ready = False
        self._device = _CPU
        self._starts: list[tuple[Callable[..., object], list[Any]]] = []
        # Arguments that are addresses in the operator's tensors, by number of the tensor: the list
        # and the place in it.
        self._inside: dict[int, list[tuple[list[Any], int]]] = {}
        # Tensors that overlap, which may only move together, and those that must not move, because
        # torch's functions have views of them.
        self._together: list[tuple[int, int]] = []
        self._fixed: set[int] = set()
        # Tensors of its own, whose addresses are arguments.
        self._held: list[Tensor] = []

    def move(self, by: Mapping[int, int]) -> None:
        """Note that tensors have moved since the last call.

        Args:
            by: the distance in bytes, by number of the argument.
        """
        for number, distance in by.items():
            if distance % _ALIGNED or (distance and number in self._fixed):
                self.ready = False
        for i, j in self._together:
            if by.get(i, 0) != by.get(j, 0):
                self.ready = False
        if self.ready:
            for number, distance in by.items():
                for arguments, place in self._inside.get(number, ()):
                    arguments[place] += distance

    def __call__(self, *args: Any) -> None:
        """Run the operator, or start what is recorded."""
        if not self.ready:
            self._record(args)
        elif self._device in (active_driver().get_current_device(), _CPU):
            self.start(self.current_stream())
        else:
            with torch.cuda.device(self._device):
                self.start(self.current_stream())

    def start(self, stream: int) -> None:
        """Start what is recorded, on a stream of the current device."""
        for start, arguments in self._starts:
            start(*arguments, stream=stream)

    @staticmethod
    def current_stream() -> int:
        """The current stream of the current device."""
        driver = active_driver()
        return driver.get_current_stream(driver.get_current_device())

    def _record(self, args: tuple[Any, ...]) -> None:
        with recording() as calls:
            self._operator(*args)
        tensors = {i: x for i, x in enumerate(args) if isinstance(x, Tensor)}
        spans = {i: range(x.data_ptr(), _end(x)) for i, x in tensors.items()}
        self._device = next(iter(tensors.values())).get_device()
        self._starts, self._inside, self._fixed, self._held = [], {}, set(), []
        self._together = [
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
                    self._inside.setdefault(number, []).append((arguments, place))
                else:
                    self._fixed.add(number)
            start = call.start if call.launch else partial(_without_stream, call.start)
            self._starts.append((start, arguments))
        # A CUDA graph that is being captured has buffers of its own: see scratch.py.
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        self.ready = bool(calls) and not capturing


def _without_stream(function: Callable[..., object], *args: Any, stream: int) -> None:
    function(*args)


def _end(x: Tensor) -> int:
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr() + (last + 1) * x.element_size() if x.numel() else x.data_ptr()
