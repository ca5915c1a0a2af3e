"""Operators that record their launches, and start them again without Triton's look-ups.

``kernel[grid](...)`` binds arguments, derives what the kernel is specialized on, and looks it up:
most of the host's time of a launch. A program calls an operator again and again with the same
layouts, mostly at the same addresses. So the first call records compiled kernels, grids and
arguments, with tensors as addresses, and later calls start them. For tensors that have moved,
addresses are replaced. Kernels are specialized on addresses that are multiples of 16: if that has
changed, the call records again.

A recorded operator does nothing but launches and :func:`.jit.torch_call`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from .jit import active_driver, recording

_ALIGNED = 16


class Recorded:
    """An operator at one place in a program. In every call its tensors have the same shapes,
    strides and dtypes, and its other arguments are the same."""

    def __init__(self, operator: Callable[..., object]) -> None:
        self._operator = operator
        self._starts: list[tuple[Callable[..., object], list[Any]]] = []
        self._addresses: list[int] = []
        # Arguments that are addresses in the operator's tensors: the list and the place in it, the
        # tensor's number, and the distance from its first byte.
        self._inside: list[tuple[list[Any], int, int, int]] = []
        # Numbers of tensors that overlap, which may only move together, and of those that must not
        # move, because torch's functions have views of them.
        self._together: list[tuple[int, int]] = []
        self._fixed: set[int] = set()
        # Tensors of its own, whose addresses are arguments.
        self._held: list[Tensor] = []

    def __call__(self, *args: Any, **options: Any) -> None:
        """Run the operator."""
        tensors = [x for x in (*args, *options.values()) if isinstance(x, Tensor)]
        addresses = [x.data_ptr() for x in tensors]
        if addresses != self._addresses and not self._move(addresses):
            self._record(args, options, tensors, addresses)
            return
        index = tensors[0].get_device()
        driver = active_driver()
        if index >= 0 and index != driver.get_current_device():
            with torch.cuda.device(index):
                self._start(driver.get_current_stream(index))
        else:
            self._start(driver.get_current_stream(max(index, 0)))

    def _start(self, stream: int) -> None:
        for start, arguments in self._starts:
            start(*arguments, stream=stream)

    def _move(self, addresses: list[int]) -> bool:
        """Replace addresses, unless kernels must be others."""
        moved = [new - old for new, old in zip(addresses, self._addresses, strict=False)]
        if (
            not self._starts
            or any(by % _ALIGNED for by in moved)
            or any(moved[i] for i in self._fixed)
            or any(moved[i] != moved[j] for i, j in self._together)
        ):
            return False
        for arguments, place, number, distance in self._inside:
            arguments[place] = addresses[number] + distance
        self._addresses = addresses
        return True

    def _record(self, args: Any, options: Any, tensors: list[Tensor], addresses: list[int]) -> None:
        with recording() as calls:
            self._operator(*args, **options)
        spans = [range(x.data_ptr(), _end(x)) for x in tensors]
        self._addresses, self._starts = addresses, []
        self._inside, self._fixed, self._held = [], set(), []
        self._together = [
            (i, j)
            for (i, a), (j, b) in combinations(enumerate(spans), 2)
            if a.start < b.stop and b.start < a.stop
        ]
        for call in calls:
            arguments = list(call.arguments)
            for i, x in enumerate(arguments):
                if not isinstance(x, Tensor):
                    continue
                address = x.data_ptr()
                number = next((n for n, span in enumerate(spans) if address in span), None)
                if call.launch:
                    arguments[i] = address
                if number is None:
                    self._held.append(x)
                elif call.launch:
                    place = (arguments, i, number, address - addresses[number])
                    self._inside.append(place)
                else:
                    self._fixed.add(number)
            start = call.start if call.launch else partial(_without_stream, call.start)
            self._starts.append((start, arguments))


def _without_stream(function: Callable[..., object], *args: Any, stream: int) -> None:
    function(*args)


def _end(x: Tensor) -> int:
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr() + (last + 1) * x.element_size() if x.numel() else x.data_ptr()
