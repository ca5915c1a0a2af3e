"""Feedback: what happens to the part of a gradient that a codec did not send.

With ``g`` a rank's gradient, ``e`` its residual and ``C`` the codec, the plain rule is::

    x = g + e; send C(x); e <- x - C(x)

A codec's operator does that in one pass. A kind may change what the operator keeps
(``old_share``), and what the owner of a shard computes from the sum, with a state of its own.

**A lead.** If a codec's messages carry the share ``K`` of gradient plus residual, a gradient ``g``
arrives as ``K * g`` in its step, ``K * (1 - K) * g`` in the next, and so on: a moving average, late
by ``(1 - K) / K`` steps. This lag is small beside the ten steps of a momentum, but it adds to them.
With momentum ``b``, an optimizer is stable up to a curvature of ``2 (1 + b) / (1 - b)`` over the
learning rate: 38 for 0.9, but only 1 if gradients are one step late. With a *lead*, the owner
therefore inverts the average. ``Q`` is the last sum that it received::

    hand out (sum of C(x) - (1 - K) * Q) / K, Q <- sum of C(x)        Q is zero before the first

In total, the owner has then handed out what was sent, plus ``(1 - K) / K * Q``. On average, this
surplus equals the residuals of all ranks. Quantization noise grows by ``1 / K``, but only where it
changes from step to step, and a momentum averages that out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Self

import torch
from pydantic import Field, model_validator

from tagc.codecs.config import Strict, unit

OWNER_RESIDUAL = "owner_residual"
"""Name, in checkpoints, of the residual of the sums that owners send in two shots."""


class FeedbackConfig(Strict):
    """What happens to the part of a gradient that a codec did not send.

    `residual` keeps it on each rank in `dtype` and adds it to the next gradient. `average` (LoCo)
    keeps a moving average of it instead, with weight `beta` for the old value and `1 - beta` for
    the new one, and restarts from zero every `reset_steps` reductions. `none` drops it.

    If a codec sends the share `lead` of gradient plus residual, gradients arrive late, by
    `(1 - lead) / lead` steps on average, and lateness costs more than noise. With a `lead` below 1
    the owner undoes the lag: it hands out `(sent - (1 - lead) * sent before) / lead`.
    """

    kind: Literal["none", "residual", "average"] = "residual"
    """Whether what was not sent is kept, averaged or dropped."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the stored residual: 4 or 2 bytes per element; not with kind none."""
    beta: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False), unit("share")] = 0.8
    """Weight of the old value in the moving average; kind average only."""
    reset_steps: Annotated[int, Field(ge=1, le=2**31 - 1), unit("reductions")] = 1024
    """After how many reductions the moving average restarts from zero; kind average only."""
    lead: Annotated[float, Field(ge=0.05, le=1, allow_inf_nan=False), unit("share")] = 1.0
    """Share of gradient plus residual that the codec sends in a step; below 1 the owner undoes the
    lag; kind residual only."""

    @model_validator(mode="after")
    def _check_unused(self) -> Self:
        if self.kind == "none" and self.dtype != "float32":
            raise ValueError(f"dtype {self.dtype!r} has no effect: kind 'none' stores nothing")
        for kind, keys in {
            "average": {"beta", "reset_steps"},
            "residual": {"lead"},
        }.items():
            unused = sorted(self.model_fields_set & keys)
            if self.kind != kind and unused:
                raise ValueError(f"{' and '.join(unused)}: only for the kind {kind!r}")
        return self


SENT = "sent"
OWNER_STATES = (SENT,)
"""Names of the owners' states in checkpoints."""


@dataclass(frozen=True, kw_only=True)
class FeedbackRule:
    """Error feedback, which adds what was not sent to the next gradient; or a form of it.

    Attributes:
        dtype: dtype of the residual.
        old_share: share of the old residual that stays, the operators' ``average``; for LoCo
            (arXiv 2407.04480, in DeepSpeed's form): ``e <- beta * e + (1 - beta) * (x - C(x))``.
        restarts: after how many reductions the residual restarts from zero; None for never.
        lead: ``K``, the share of gradient plus residual that a message is assumed to carry. If it
            is below 1, the owner undoes the lag.
    """

    dtype: torch.dtype
    old_share: float = 0.0
    restarts: int | None = None
    lead: float = 1.0

    @property
    def owner_state(self) -> str | None:
        """Name of the owner's state in checkpoints; None if the owner keeps nothing."""
        return SENT if self.lead < 1 else None

    @property
    def note(self) -> str | None:
        """Advice about the rule that a plan gives the user; None for none."""
        if self.owner_state is None:
            return None
        return (
            "a lead makes gradients noisier, so an optimizer like Adam takes smaller steps: call "
            "compressor.keep_rates(optimizer), which measures how much smaller and undoes it, or "
            "retune the learning rate (docs/quality.md)"
        )

    def row_bytes(self, columns: int) -> int:
        """Bytes stored for a row of the residual."""
        return self.dtype.itemsize * columns

    @property
    def gain(self) -> float:
        """The largest factor by which the optimizer's gradients may exceed every sum so far: the
        worst case is a sum that changes its sign."""
        return (2 - self.lead) / self.lead


def plan_feedback(config: FeedbackConfig) -> FeedbackRule | None:
    """The rule for a policy's settings; None for the kind ``none``, which stores nothing."""
    dtype = getattr(torch, config.dtype)
    if config.kind == "none":
        return None
    if config.kind == "average":
        return FeedbackRule(dtype=dtype, old_share=config.beta, restarts=config.reset_steps)
    return FeedbackRule(dtype=dtype, lead=config.lead)
