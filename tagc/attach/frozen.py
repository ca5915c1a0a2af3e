"""Finds frozen parameters whose values do not survive few bits; they are sent uncompressed.

A block of 8-bit codes that contains an infinity decodes to NaN. If it contains the most negative
number of a dtype, such as a mask's, its other values become zero or infinite. If it has two values,
as masks do, it changes one of them. Trainable parameters do not keep such values for long, but
buffers that were made frozen parameters do. So in ``tagc.wrap`` each rank looks at its shards, and
all ranks decide by what any of them saw.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tagc.attach.unit import Unit
from tagc.codecs import Special

# Values above this share of the largest number of their dtype are special: codes of few bits and a
# scale of 8 significant bits round up, in 4 bits by a seventh and more, and must not overflow.
_EDGE = 0.5


@dataclass(frozen=True)
class ShardValues:
    """Facts about the values in a shard of a frozen parameter.

    Attributes:
        largest: largest magnitude; infinite if any value is not finite.
        few: the distinct values if there are at most two; None for more.
    """

    largest: float
    few: frozenset[float] | None

    def merged(self, other: ShardValues) -> ShardValues:
        """The facts about both shards together."""
        few = None if self.few is None or other.few is None else self.few | other.few
        few = few if few is not None and len(few) <= 2 else None
        return ShardValues(max(self.largest, other.largest), few)


def look_at_frozen(units: Sequence[Unit]) -> dict[str, ShardValues]:
    """Look at this rank's shards of all gathered frozen parameters, by name. Waits for the
    device."""
    return {
        name: _values_of(shard)
        for unit in units
        if unit.gather_info is not None and unit.gather_info.dtype.is_floating_point
        for name, shard in unit.frozen_shards().items()
    }


def with_specials(units: Sequence[Unit], seen: Mapping[str, ShardValues]) -> list[Unit]:
    """The units, with the special values that all ranks together saw in frozen parameters."""
    found = []
    for unit in units:
        info = unit.gather_info
        if info is not None:
            params = tuple(
                replace(param, special=_special(seen[param.name], info.dtype))
                if param.name in seen
                else param
                for param in info.params
            )
            unit = replace(unit, gather_info=replace(info, params=params))
        found.append(unit)
    return found


def _values_of(shard: Tensor) -> ShardValues:
    if shard.numel() == 0 or shard.is_meta:
        return ShardValues(0.0, frozenset())
    if not bool(shard.isfinite().all()):
        return ShardValues(math.inf, None)
    smallest, largest = (end.item() for end in shard.aminmax())
    few = bool(((shard == smallest) | (shard == largest)).all())
    return ShardValues(
        max(abs(smallest), abs(largest)), frozenset((smallest, largest)) if few else None
    )


def _special(values: ShardValues, dtype: torch.dtype) -> Special | None:
    if values.largest == math.inf:
        return Special.NOT_FINITE
    if values.largest > _EDGE * torch.finfo(dtype).max:
        return Special.LARGE
    # Zeros alone stay zeros in any code.
    return Special.FEW if values.few is not None and values.few - {0.0} else None
