"""Preserves residuals and owner states of columns that a backward does not reach."""

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
    """The missing columns of a segment, whose feedback state must not change.

    Attributes:
        residual: their place in the feedback's residual.
        owner_state: their place in the feedback's owner state.
    """

    feedback: SegmentFeedback
    residual: Places
    owner_state: Places


@contextmanager
def set_aside(debts: Sequence[Debt], codecs: Iterable[Codec]) -> Iterator[None]:
    """Restore the missing columns' residuals and owner states after a reduction. Messages carry
    some of these residuals, but FSDP has no buffer for the result.

    Args:
        codecs: codecs with no present parameter. Their thresholds would follow the zeros, so their
            state is restored, too.
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
        # No boolean indexing: it would wait for the device.
        stored.copy_(torch.where(places, taken[0], stored))
        return
    for columns, piece in zip(places, taken, strict=True):
        stored[..., columns] = piece
