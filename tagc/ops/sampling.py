"""What a step measures on a sample of elements, on the device.

A step samples every ``stride``-th element, from another one in every step; the order repeats only
after all of them. The last elements, fewer than a stride, are left out, so that a sample has the
same size in every step. If the step's number is negative, nothing is learnt: a CUDA graph measures
in all of its replays, of which only some count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tagc.ops.program import Operator

SAMPLE = 4096
"""Elements that a step samples of a segment."""
_DECAY = 0.95
"""Weight of the old value in a moving average: it reaches back by 20 measurements."""
_MIX = 0x9E3779B1

Spans = tuple[tuple[int, int], ...]


def noise_samples(spans: Spans) -> int:
    """Elements of the samples of columns ``spans``."""
    return sum((stop - start) // _noise_stride(start, stop) for start, stop in spans)


@dataclass(frozen=True)
class SampleGradient(Operator):
    """``(row [1, S], step [], own [m] float64)``: samples of the columns ``spans``."""

    spans: Spans

    def run(self, row: Tensor, step: Tensor, own: Tensor) -> None:
        torch.cat([*_samples(row, step, self.spans)], out=own)


@dataclass(frozen=True)
class CompareNoise(Operator):
    """``(out [1, S], step [], own [m], sums [spans, 2] float64)``: compares samples of this rank's
    gradient with the decoded result. ``sums`` are, by span, the total weight of the measured steps,
    and their weighted sum of ``scale * E[g h] / E[h h]``."""

    spans: Spans
    scale: float

    def run(self, out: Tensor, step: Tensor, own: Tensor, sums: Tensor) -> None:
        handed = [*_samples(out, step, self.spans)]
        shares = [
            (g * h).sum() * self.scale / (h * h).sum()
            for g, h in zip(own.split([len(h) for h in handed]), handed, strict=True)
        ]
        share = torch.stack(shares)
        new = torch.stack((torch.ones_like(share), share), dim=1)
        # Users see non-finite values in the gradient; here they (or 0 / 0) would stay for ever.
        learns = share.isfinite()[:, None] & (step >= 0)
        learnt = sums * _DECAY + new * (1 - _DECAY)
        torch.where(learns, learnt, sums, out=sums)


def _noise_stride(start: int, stop: int) -> int:
    return -(-(stop - start) // SAMPLE)


def _samples(row: Tensor, step: Tensor, spans: Spans) -> Iterator[Tensor]:
    """The sample of each span, float64."""
    for start, stop in spans:
        part, stride = row[0, start:stop], _noise_stride(start, stop)
        if stride > 1:
            # Without a product of large numbers, which int64 could not hold.
            first = step % stride * (_MIX % stride) % stride
            numbers = torch.arange(len(part) // stride, dtype=torch.int64, device=part.device)
            part = part[numbers * stride + first]
        yield part.double()
