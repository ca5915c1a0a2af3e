"""Frozen parameters whose values few bits cannot carry: they travel as they are.

A block of 8-bit codes with an infinity in it comes out NaN, one with the smallest number of a dtype
in it zero or infinite elsewhere, and of two values as masks have them it changes one. Trainable
parameters have no such values for long; buffers that somebody made frozen parameters do. So in
``tagc.wrap`` each rank looks at its shards, and all decide by what all saw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tagc.codecs import Special
from tagc.fsdp.unit import Unit
from tagc.plan import UnitParam

# Larger than this share of the largest number of their dtype, values are at its edge.
_EDGE = 0.5


@dataclass(frozen=True, kw_only=True)
class ShardValues:
    """What is in a shard of a frozen parameter.

    Attributes:
        finite: whether all of it is.
        largest: magnitude, if it is.
        few: the values, if these are at most two; None for more.
    """

    finite: bool
    largest: float
    few: frozenset[float] | None


FrozenValues = Mapping[str, ShardValues]
"""By name of the parameter; what one rank sees."""


def look_at_frozen(units: Sequence[Unit]) -> FrozenValues:
    """Look at this rank's shards of all frozen parameters that are gathered; waits for the
    device."""
    return {
        name: _values_of(shard)
        for unit in units
        if unit.gather_info is not None and unit.gather_info.dtype.is_floating_point
        for name, shard in unit.frozen_shards().items()
    }


def with_specials(units: Sequence[Unit], seen: Sequence[FrozenValues]) -> list[Unit]:
    """The units, with what all ranks together saw in their frozen parameters."""
    return [_with_specials(unit, seen) for unit in units]


def _with_specials(unit: Unit, seen: Sequence[FrozenValues]) -> Unit:
    info = unit.gather_info
    if info is None:
        return unit
    params = tuple(_looked_at(param, seen, info.dtype) for param in info.params)
    return replace(unit, gather_info=replace(info, params=params))


def _looked_at(param: UnitParam, seen: Sequence[FrozenValues], dtype: torch.dtype) -> UnitParam:
    shards = [values[param.name] for values in seen if param.name in values]
    return replace(param, special=_special(shards, dtype)) if shards else param


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


def _special(shards: Sequence[ShardValues], dtype: torch.dtype) -> Special | None:
    if not all(shard.finite for shard in shards):
        return Special.NOT_FINITE
    if max((shard.largest for shard in shards), default=0.0) > _EDGE * torch.finfo(dtype).max:
        return Special.LARGE
    values: set[float] = set()
    for shard in shards:
        if shard.few is None:
            return None
        values |= shard.few
    # Zeros alone are zeros in any code.
    return Special.FEW if len(values) <= 2 and values - {0.0} else None
