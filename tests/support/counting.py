"""Bytes that collectives send, counted from their tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from tagc.comm import transport


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """Bytes of this rank's tensors that others get, for each collective or message of gloo."""
    counts: list[int] = []

    def send(sent: Tensor, **options: Any) -> Any:
        # The counts to compare with leave out headers, too.
        if options["tag"] != transport.HEADER_TAG:
            counts.append(sent.numel() * sent.element_size())
        return dist.isend(sent, **options)

    def counting(fn: Callable, times: int, position: int) -> Callable:
        def call(*args: Any, **options: Any) -> Any:
            sent, W = args[position], options["group"].size()
            counts.append(times * sent.numel() * sent.element_size() * (W - 1) // W)
            return fn(*args, **options)

        return call

    replaced = SimpleNamespace(**vars(dist))
    replaced.isend = send
    replaced.all_reduce = counting(dist.all_reduce, 2, 0)
    with (
        patch.object(transport, "dist", replaced),
        patch.object(transport, "reduce_scatter", counting(transport.reduce_scatter, 1, 1)),
        patch.object(transport, "all_gather", counting(transport.all_gather, 0, 0)),
    ):
        yield counts
