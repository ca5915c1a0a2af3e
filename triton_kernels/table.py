"""The buffers of one decode: union bitmap, present keys with their values, peeling table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from tagc.ops.sketch import SketchLayout

from .scratch import buffer

# Words per program of the union, and per partial sum of the number of keys.
UNION_BLOCK = 1024
# Launches of peeling that can hand a flag to the next.
FLAGS = 512


@dataclass(frozen=True, kw_only=True)
class Table:
    """Device buffers; all but the first are None in a direct layout.

    ``keys`` and ``values`` have room for every group, not only for the ``layout.keys`` that the
    sketch is sized for, so that an overfull union is peeled as far as it goes and nothing is lost.

    Attributes:
        union: ``[words + 1]`` int32 bitmap, then the poison word.
        offset: ``[words]`` int32, keys before each word in its block.
        blocks: int32, keys per ``UNION_BLOCK`` words.
        first_slot: ``[words]`` int32, slot of the first key of each word.
        keys: ``[groups]`` int32, present groups in ascending order; -1 once recovered.
        values: ``[groups]`` recovered symbols by slot, 0 where not recovered.
        exact: ``[groups]`` float64 values by slot, for ``float32`` symbols only.
        entry: ``[cells]`` int64 (value and degree) or float64 (value).
        degree: ``[cells]`` int32, for ``float32`` symbols only.
        flags: ``[FLAGS]`` int32, 1 where a launch of peeling has work to look for.
    """

    union: Tensor
    offset: Tensor | None = None
    blocks: Tensor | None = None
    first_slot: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None
    exact: Tensor | None = None
    entry: Tensor | None = None
    degree: Tensor | None = None
    flags: Tensor | None = None


def table_of(layout: SketchLayout, device: torch.device) -> Table:
    """The buffers for this layout, kept between calls."""

    def take(purpose: str, numel: int, dtype: torch.dtype) -> Tensor:
        return buffer(purpose, (numel,), dtype, device, layout)

    union = take("union", layout.index_words, torch.int32)
    if layout.direct:
        return Table(union=union)
    integer = layout.symbol.integer
    return Table(
        union=union,
        offset=take("offset", layout.words, torch.int32),
        blocks=take("blocks", triton.cdiv(layout.words, UNION_BLOCK), torch.int32),
        first_slot=take("first_slot", layout.words, torch.int32),
        keys=take("keys", layout.groups, torch.int32),
        values=take("values", layout.groups, layout.symbol.dtype),
        exact=None if integer else take("exact", layout.groups, torch.float64),
        entry=take("entry", layout.cells, torch.int64 if integer else torch.float64),
        degree=None if integer else take("degree", layout.cells, torch.int32),
        flags=take("flags", FLAGS, torch.int32),
    )
