"""Scratch buffers and CUDA graphs, with a stand-in for the device: which memory they come from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from support.launches import kernels

CUDA = torch.device("cuda", 0)


class Device:
    """A stand-in for a GPU: its current stream, the graph that it captures, and whose memory a
    tensor's address is in: a graph's, or None."""

    def __init__(self) -> None:
        self.stream, self.graph = 1, None
        self.origin: dict[int, Any] = {}
        self.kept: list[Tensor] = []  # so that no address comes twice

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """In place of ``torch.empty``."""
        assert device == CUDA
        made = torch.zeros(shape, dtype=dtype)
        self.origin[made.data_ptr()] = self.graph
        self.kept.append(made)
        return made

    @contextlib.contextmanager
    def capture(self, graph: str) -> Iterator[None]:
        """The current stream captures."""
        self.graph = graph
        yield
        self.graph = None


@pytest.fixture
def device(monkeypatch) -> Device:
    device, scratch = Device(), kernels("scratch")
    cuda = SimpleNamespace(
        is_current_stream_capturing=lambda: device.graph is not None,
        current_stream=lambda device_: SimpleNamespace(cuda_stream=device.stream),
    )
    monkeypatch.setattr(scratch, "torch", SimpleNamespace(empty=device.empty, cuda=cuda))
    monkeypatch.setattr(scratch, "_BUFFERS", {})
    return device


def take(purpose: str = "keys", layout: int = 0) -> Tensor:
    return kernels("scratch").buffer(purpose, (8,), torch.int32, CUDA, layout)


def test_kept_for_one_stream_until_released(device):
    first = take()
    assert take() is first
    assert take("other") is not first
    assert take(layout=1) is not first
    device.stream = 2
    assert take() is not first
    device.stream = 1
    assert take() is first
    kernels("scratch").release()
    assert take() is not first


def test_a_graph_has_memory_of_its_own(device):
    before = take()  # on the stream that captures later
    for graph in ("first", "second"):
        with device.capture(graph):
            one, other = take(), take()  # two of one operator
            assert one is not other
            for found in (one, other, take("table")):
                assert device.origin[found.data_ptr()] == graph
            if graph == "second":
                kernels("scratch").release()
                assert device.origin[take().data_ptr()] == graph
        if graph == "first":
            assert take() is before
        assert device.origin[take().data_ptr()] is None
        assert device.origin[take("table").data_ptr()] is None
