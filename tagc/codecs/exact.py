"""Codec ``exact``: 16-bit parameters in fewer bits, to the bit.

Ranks that decode have a copy of the parameters as of the last message, as with ``delta``. A change
counts the numbers between the old value and the new one, so nothing is rounded, and the copy *is*
the parameters. Without a copy, messages have the parameters themselves, with packed exponents.

How long a message is depends on the parameters: ranks first tell each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import numpy as np
import torch

from tagc.codecs.config import CodecConfig, Special
from tagc.codecs.plan import CodecPlan, PlanRequest
from tagc.ops.exact import MANTISSA, ExactLayout
from tagc.ops.exponents import ExponentLayout
from tagc.ops.launches import DecodeExact, MeasureExact, PackExponents, UnpackExponents
from tagc.ops.program import Launch, Place
from tagc.ops.torch_operators import Copy

_EXPECTED_BITS = 4
# Bits an element at learning rates, a little more than the means in docs/exact.md.
_MEASURED = {1e-6: 0.2, 1e-5: 0.55, 3e-4: 2.3, 3e-3: 4.2}


def expected_bits(rate: float) -> float:
    """Bits an element that messages are expected to have at an AdamW's learning rate, on average
    over a run: a line in the rate's logarithm between measured rates, constant beyond them."""
    return float(np.interp(math.log(rate), np.log([*_MEASURED]), [*_MEASURED.values()]))


class ExactConfig(CodecConfig):
    """Parameters without any loss, in FSDP's all-gather, which gathers in bfloat16 or float16.

    All ranks compute with the bits that FSDP would gather. Messages have changes since the last
    one: 2 to 6 bits an element in training and less than 1 when fine-tuning, and never more than
    the parameters themselves. The ranks of a host share a copy of the unit's parameters, as with
    `delta`, and messages are sent once for every step of the optimizer. First, ranks tell each
    other how long their messages are, and wait for that.
    """

    kind: Literal["exact"] = "exact"
    """The codec's name."""
    keep_copy: bool = True
    """Without a copy, each all-gather has the parameters with packed exponents, in 12.25 bits an
    element (bfloat16 only), and waits until ranks know that all exponents fit; if not, it has the
    parameters themselves."""

    def carries(self, special: Special) -> bool:
        """See :meth:`CodecConfig.carries`: everything."""
        return True


@dataclass(frozen=True, kw_only=True)
class ExactChanges(CodecPlan):
    """How the changes of one segment are sent.

    Attributes:
        capacity: words of a message; in a plan, those that are expected in training.
    """

    exact: ClassVar[bool] = True

    layout: ExactLayout
    capacity: int
    of_changes: bool = True

    @property
    def name(self) -> str:
        return "exact"

    @property
    def measured_words(self) -> int:
        return self.layout.plan_words

    def measuring(self, x: Place, old: Place, measured: Place) -> Iterator[Launch]:
        yield Launch(MeasureExact(self.layout), (x, old, measured), self.name)

    @property
    def words(self) -> int:
        return self.capacity

    def resized(self, columns: int) -> Self:
        layout = replace(self.layout, spans=(columns,))
        return replace(self, layout=layout, capacity=layout.words)

    def fitting(self, measured: int) -> Self:
        """See :meth:`CodecPlan.fitting`. Messages of up to ``measured`` words get a little more, so
        that few sizes of messages occur."""
        step = 1 << max(0, measured.bit_length() - 6)
        return replace(self, capacity=min(-(-measured // step) * step, self.layout.words))

    @property
    def largest(self) -> Self:
        return replace(self, capacity=self.layout.words)

    def at_rate(self, rate: float) -> Self:
        """The plan with the words that are expected at a learning rate."""
        return replace(self, capacity=_expected_words(self.layout, expected_bits(rate)))

    def decoding(self, messages: Place, rows: Place) -> Iterator[Launch]:
        yield Launch(DecodeExact(self.layout), (messages, rows), self.name)


@dataclass(frozen=True, kw_only=True)
class PackedExponents(CodecPlan):
    """How one segment is sent without a copy.

    Attributes:
        raw: whether there is room for the parameters themselves, in case a rank's exponents do not
            fit. Expected are some that do.
    """

    exact: ClassVar[bool] = True

    layout: ExponentLayout
    raw: bool = False

    @property
    def name(self) -> str:
        return "exact packed"

    @property
    def measured_words(self) -> int:
        return 1

    @property
    def words(self) -> int:
        return self.layout.raw_words if self.raw else self.layout.words

    def resized(self, columns: int) -> Self:
        return replace(self, layout=ExponentLayout(numel=columns))

    def fitting(self, measured: int) -> Self:
        return replace(self, raw=measured > 0)

    @property
    def largest(self) -> Self:
        return replace(self, raw=True)

    def measuring(self, x: Place, old: Place, measured: Place) -> Iterator[Launch]:
        yield Launch(PackExponents(self.layout), (x, self._room), self.name)
        yield Launch(Copy(), (self._room[:1], measured), self.name)

    def encoding(
        self, x: Place, message: Place, residual: Place | None = None, seeds: Place | None = None
    ) -> Iterator[Launch]:
        if self.raw:
            yield Launch(PackExponents(self.layout), (x, message), self.name)
        else:
            yield Launch(PackExponents(self.layout), (x, self._room), self.name)
            yield Launch(Copy(), (self._room[: self.words], message), self.name)

    @property
    def _room(self) -> Place:
        return Place("packed", (1, self.layout.raw_words), torch.int32)

    def decoding(self, messages: Place, rows: Place) -> Iterator[Launch]:
        yield Launch(UnpackExponents(self.layout), (messages, rows), self.name)


def plan_exact(config: ExactConfig, request: PlanRequest) -> ExactChanges | PackedExponents:
    """The sizes of one segment."""
    if not config.keep_copy and request.dtype == torch.bfloat16:
        return PackedExponents(layout=ExponentLayout(numel=request.columns))
    if not config.keep_copy and request.dtype == torch.float16:
        raise ValueError(
            "the parameters are gathered in float16, whose exponents leave nothing to pack: "
            "gather them in bfloat16, or set 'keep_copy: true'"
        )
    if request.dtype not in MANTISSA:
        dtype = str(request.dtype).removeprefix("torch.")
        why = f"the parameters are gathered in {dtype}, whose changes do not compress"
        other = ", or use codec 'quantized' or 'delta'"
        if request.dtype == torch.uint8:
            why = "its unit has parameters of several dtypes, which FSDP gathers as bytes"
            other = ", or leave them out"
        raise ValueError(
            f"{why}: gather them in bfloat16, with fully_shard(..., mp_policy="
            f"MixedPrecisionPolicy(param_dtype=torch.bfloat16)){other}"
        )
    layout = ExactLayout(spans=tuple(request.spans), dtype=request.dtype)
    return ExactChanges(layout=layout, capacity=_expected_words(layout, _EXPECTED_BITS))


def _expected_words(layout: ExactLayout, bits: float) -> int:
    return min(max(1, math.ceil(bits * layout.numel / 32)), layout.words)
