"""Memory that FSDP or DDP and an optimizer need per rank, from a model's units."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tagc.plan import UnitInfo

STATE_BYTES = 16
"""Bytes per parameter of a rank: itself, its gradient and Adam's two moments, in float32."""


def training_bytes(reduces: Sequence[UnitInfo], gathers: Sequence[UnitInfo]) -> int:
    """Bytes that a rank needs, without activations.

    They are the sharded state; the unsharded parameters of the root and of two blocks (FSDP gathers
    one ahead); and the unsharded gradients of one unit, twice: as FSDP holds them, and in the
    buffer that it reduces.

    Args:
        reduces, gathers: one of each for every unit, in the same order. The root's name is empty.
    """
    shards = [sum(p.columns for p in info.params) for info in gathers]
    gathered = [g.world_size * n * g.dtype.itemsize for g, n in zip(gathers, shards, strict=True)]
    root = sum(size for g, size in zip(gathers, gathered, strict=True) if not g.name)
    blocks = sorted(size for g, size in zip(gathers, gathered, strict=True) if g.name)
    gradients = [
        r.world_size * sum(p.columns for p in r.params) * (r.dtype.itemsize + g.dtype.itemsize)
        for r, g in zip(reduces, gathers, strict=True)
    ]
    return STATE_BYTES * sum(shards) + root + sum(blocks[-2:]) + max(gradients, default=0)


def replicated_bytes(parameters: int, reduces: Sequence[UnitInfo]) -> int:
    """Bytes that a rank needs with DDP, without activations: the state of all parameters, and the
    gradients once more, in DDP's buckets.

    Args:
        parameters: their number, also of those that are frozen.
        reduces: the all-reduce of every unit.
    """
    buckets = sum(r.dtype.itemsize * math.prod(p.shape) for r in reduces for p in r.params)
    return STATE_BYTES * parameters + buckets
