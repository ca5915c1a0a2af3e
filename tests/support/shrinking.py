"""Shrink random sequences that fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def shrunk(calls: list[T], fails: Callable[[list[T]], bool]) -> list[T]:
    """A smallest part of the calls that still fails: it needs every one of them."""
    at = 0
    while at < len(calls):
        fewer = calls[:at] + calls[at + 1 :]
        if fails(fewer):
            calls = fewer
        else:
            at += 1
    return calls


def anywhere(wrong: str) -> bool:
    """Whether something is wrong on any rank; all ranks call it."""
    found = torch.tensor([bool(wrong)])
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found)
