"""Finds frozen parameters whose values do not survive few bits; they are sent uncompressed.

A block of 8-bit codes that contains an infinity decodes to NaN. If it contains the most negative
number of a dtype, such as a mask's, its other values become zero or infinite. If it has two values,
as masks do, it changes one of them. Trainable parameters do not keep such values for long, but
buffers that were made frozen parameters do. So in ``tagc.wrap`` each rank looks at its shards, and
all ranks decide by what any of them saw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tagc.attach.unit import Unit
from tagc.codecs import Special
from tagc.plan import UnitParam

# Values above this share of the largest number of their dtype are special: codes of few bits and a
# scale of 8 significant bits round up, in 4 bits by a seventh and more, and must not overflow.
_EDGE = 0.5


@dataclass(frozen=True, kw_only=True)
class ShardValues:
    """Facts about the values in a shard of a frozen parameter.

    Attributes:
        finite: whether all values are finite.
        largest: largest magnitude, if all values are finite.
        few: the distinct values if there are at most two; None for more.
    """

    finite: bool
    largest: float
    few: frozenset[float] | None

    def merged(self, other: ShardValues) -> ShardValues:
        """The facts about both shards together."""
        few = None if self.few is None or other.few is None else self.few | other.few
        return ShardValues(
            finite=self.finite and other.finite,
            largest=max(self.largest, other.largest),
            few=few if few is not None and len(few) <= 2 else None,
        )


FrozenValues = Mapping[str, ShardValues]
"""The facts by the parameter's name."""


def look_at_frozen(units: Sequence[Unit]) -> FrozenValues:
    """Look at this rank's shards of all gathered frozen parameters. Waits for the device."""
    return {
        name: _values_of(shard)
        for unit in units
        if unit.gather_info is not None and unit.gather_info.dtype.is_floating_point
        for name, shard in unit.frozen_shards().items()
    }


def with_specials(units: Sequence[Unit], seen: FrozenValues) -> list[Unit]:
    """The units, with the special values that all ranks together saw in frozen parameters."""
    return [_with_specials(unit, seen) for unit in units]


def _with_specials(unit: Unit, seen: FrozenValues) -> Unit:
    info = unit.gather_info
    if info is None:
        return unit
    params = tuple(_looked_at(param, seen, info.dtype) for param in info.params)
    return replace(unit, gather_info=replace(info, params=params))


def _looked_at(param: UnitParam, seen: FrozenValues, dtype: torch.dtype) -> UnitParam:
    values = seen.get(param.name)
    return param if values is None else replace(param, special=_special(values, dtype))


def _values_of(shard: Tensor) -> ShardValues:
    if shard.numel() == 0 or shard.is_meta:
        return ShardValues(finite=True, largest=0.0, few=frozenset())
    smallest, largest = (end.item() for end in shard.aminmax())
    if not bool(shard.isfinite().all()):
        return ShardValues(finite=False, largest=0.0, few=None)
    few = bool(((shard == smallest) | (shard == largest)).all())
    return ShardValues(
        finite=True,
        largest=max(abs(smallest), abs(largest)),
        few=frozenset((smallest, largest)) if few else None,
    )


def _special(values: ShardValues, dtype: torch.dtype) -> Special | None:
    if not values.finite:
        return Special.NOT_FINITE
    if values.largest > _EDGE * torch.finfo(dtype).max:
        return Special.LARGE
    # Zeros alone stay zeros in any code.
    return Special.FEW if values.few is not None and values.few - {0.0} else None
