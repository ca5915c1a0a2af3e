"""What is owed for columns that a backward does not reach, kept as it is during a reduction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from tagc.codecs import Codec
from tagc.codecs.feedback import SegmentFeedback

Places = Sequence[slice] | Tensor
"""Columns of a residual, or a mask of its shape."""


@dataclass(frozen=True)
class Debt:
    """What is owed for missing columns of a segment.

    Attributes:
        residual: where these are in the feedback's residual.
        owner_state: likewise in what the owner keeps.
    """

    feedback: SegmentFeedback
    residual: Places
    owner_state: Places


@contextmanager
def set_aside(debts: Sequence[Debt], codecs: Iterable[Codec]) -> Iterator[None]:
    """After a reduction, owe for missing columns what was owed before. Messages carry some of
    that, too, and FSDP has no place for it.

    Args:
        codecs: those whose segments are missing altogether. Thresholds would follow the zeros, so
            their state is also as before.
    """
    states = [(codec, {k: t.clone() for k, t in codec.state().items()}) for codec in codecs]
    kept = []
    for debt in debts:
        residual, owner_state = debt.feedback.residual, debt.feedback.owner_state
        owed = None if residual is None else _take(residual.read(), debt.residual)
        kept.append((owed, None if owner_state is None else _take(owner_state, debt.owner_state)))
    try:
        yield
    finally:
        for debt, (owed, owned) in zip(debts, kept, strict=True):
            residual, owner_state = debt.feedback.residual, debt.feedback.owner_state
            if residual is not None and owed is not None:
                with residual.opened() as now:
                    _put(now, debt.residual, owed)
            if owner_state is not None and owned is not None:
                _put(owner_state, debt.owner_state, owned)
        for codec, state in states:
            codec.load_state(state)


def _take(stored: Tensor, places: Places) -> Sequence[Tensor]:
    if isinstance(places, Tensor):
        return [stored.clone()]
    return [stored[..., columns].clone() for columns in places]


def _put(stored: Tensor, places: Places, taken: Sequence[Tensor]) -> None:
    if isinstance(places, Tensor):
        # Boolean indexing would wait for the device.
        stored.copy_(torch.where(places, taken[0], stored))
        return
    for columns, piece in zip(places, taken, strict=True):
        stored[..., columns] = piece
