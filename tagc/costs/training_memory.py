"""What training itself needs of a rank's memory: FSDP and an optimizer, by a model's units."""

from __future__ import annotations

from collections.abc import Sequence

from tagc.plan import UnitInfo

STATE_BYTES = 16
"""Of a parameter, sharded: itself, its gradient and the two moments of Adam, in float32."""


def training_bytes(reduces: Sequence[UnitInfo], gathers: Sequence[UnitInfo]) -> int:
    """Bytes of a rank without activations: the sharded state, and, unsharded, the parameters of the
    root and of two blocks (one is gathered ahead), and the gradients of one unit, as FSDP has them
    and in the buffer that it reduces.

    Args:
        reduces, gathers: of every unit, in the same order; the root has no name.
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
