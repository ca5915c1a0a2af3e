"""Codec ``exact``: changes of 16-bit parameters in the bits that they need, to the bit.

Ranks that decode have a copy of the parameters as of the last message, as with ``delta``. A change
counts the numbers between the old value and the new one, so nothing is rounded, and the copy *is*
the parameters. How long a message is depends on the parameters: ranks first tell each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, Self

from tagc.codecs.config import CodecConfig, Special
from tagc.codecs.plan import CodecKind, CodecPlan, PlanRequest
from tagc.ops.exact import MANTISSA, ExactLayout
from tagc.ops.launches import DecodeExact
from tagc.ops.program import Launch, Place

_EXPECTED_BITS = 4
# Learning rates, and bits an element there, a little more than the means in docs/exact.md.
_MEASURED = ((1e-6, 0.2), (1e-5, 0.55), (3e-4, 2.3), (3e-3, 4.2))


def expected_bits(rate: float) -> float:
    """Bits an element that messages are expected to have at an AdamW's learning rate, on average
    over a run: a line in the rate's logarithm between measured rates, constant beyond them."""
    (lowest, bits), *_ = _MEASURED
    if rate <= lowest:
        return bits
    for (low, few), (high, many) in pairwise(_MEASURED):
        if rate <= high:
            return few + (many - few) * math.log(rate / low) / math.log(high / low)
    return _MEASURED[-1][1]


class ExactConfig(CodecConfig):
    """Changes of parameters since the last message, without any loss, in FSDP's all-gather.

    All ranks compute with the bits that FSDP would gather. A message takes 2 to 6 bits an element
    in training and less than 1 when fine-tuning, and never more than the parameters themselves.
    Parameters must be gathered in bfloat16 or float16. The ranks of a host share a copy of the
    unit's parameters, as with `delta`, and messages are sent once for every step of the optimizer.
    First, ranks tell each other how long their messages are, and wait for that.
    """

    kind: Literal["exact"] = "exact"
    """The codec's name."""

    def carries(self, special: Special) -> bool:
        """See :meth:`CodecConfig.carries`: everything."""
        return True


@dataclass(frozen=True, kw_only=True)
class ExactPlan(CodecPlan):
    """How the changes of one segment are sent.

    Attributes:
        capacity: words of a message; in a plan, those that are expected in training.
    """

    layout: ExactLayout
    capacity: int

    @property
    def name(self) -> str:
        return "exact"

    @property
    def of_changes(self) -> bool:
        return True

    @property
    def exact(self) -> bool:
        return True

    @property
    def words(self) -> int:
        return self.capacity

    def resized(self, columns: int) -> Self:
        layout = replace(self.layout, spans=(columns,))
        return replace(self, layout=layout, capacity=layout.words)

    def fitting(self, words: int) -> Self:
        """The plan for messages of up to ``words`` words: a little more, so that few sizes of
        messages occur."""
        step = 1 << max(0, words.bit_length() - 6)
        return replace(self, capacity=min(-(-words // step) * step, self.layout.words))

    @property
    def largest(self) -> Self:
        """The plan for the longest messages that can occur."""
        return replace(self, capacity=self.layout.words)

    def at_rate(self, rate: float) -> Self:
        """The plan with the words that are expected at a learning rate."""
        return replace(self, capacity=_expected_words(self.layout, expected_bits(rate)))

    def decoding(self, messages: Place, rows: Place) -> Iterator[Launch]:
        yield Launch(DecodeExact(self.layout), (messages, rows), self.name)


def plan_exact(config: ExactConfig, request: PlanRequest) -> ExactPlan:
    """The sizes of one segment."""
    if request.dtype not in MANTISSA:
        dtype = str(request.dtype).removeprefix("torch.")
        raise ValueError(
            f"the parameters are gathered in {dtype}, whose changes do not compress: gather them "
            "in bfloat16, with fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype="
            "torch.bfloat16)), or use codec 'quantized' or 'delta'"
        )
    layout = ExactLayout(spans=tuple(request.spans), dtype=request.dtype)
    return ExactPlan(layout=layout, capacity=_expected_words(layout, _EXPECTED_BITS))


def _expected_words(layout: ExactLayout, bits: float) -> int:
    return min(max(1, math.ceil(bits * layout.numel / 32)), layout.words)


EXACT = CodecKind(
    name="exact",
    parameter_config=ExactConfig,
    plan=ExactPlan,
    make_plan=plan_exact,
)
