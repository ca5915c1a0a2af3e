"""How a policy changes the best learning rate and clipping threshold of an uncompressed run."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tagc.codecs.config import Strict, unit

Factor = Annotated[float, Field(ge=0.001, le=1000), unit("times the uncompressed run's")]


class Tuning(Strict):
    """Factors from an uncompressed run's settings to this policy's, measured for optimizers like
    Adam. They do not change what is sent: plan and metrics print them, and `tagc.wrap` if a setting
    should change.

    `rate_factor` times the uncompressed run's learning rate is best. The gradients that the
    optimizer gets have `norm_factor` times the norm of uncompressed ones, so multiply a clipping
    threshold by `norm_factor` to clip as often. `compressor.keep_rates(optimizer)` measures both;
    you can then keep your settings.
    """

    rate_factor: Factor = 1
    """Best learning rate, over that of an uncompressed run."""
    norm_factor: Factor | None = None
    """Norm of the gradients that the optimizer gets, over that of uncompressed ones. None means
    that it was not measured; no hint about clipping is then printed."""

    @property
    def asks(self) -> bool:
        """Whether settings that were tuned without compression should change."""
        return self.rate_factor != 1 or self.norm_factor not in (None, 1)

    @property
    def advice(self) -> str:
        """The hint for users, as one sentence."""
        rate, norm = (_times(factor) for factor in (self.rate_factor, self.norm_factor or 1))
        if not self.asks:
            also = "" if self.norm_factor is None else " and clipping threshold"
            return f"keep the learning rate{also} of your uncompressed run"
        also = "" if self.norm_factor is None else f", and {norm} clipping threshold"
        return (
            f"use {rate} learning rate{also} of your uncompressed run; or keep both, with "
            "compressor.keep_rates(optimizer) and compressor.clip_grad_norm_"
        )


def _times(factor: float) -> str:
    return "the" if factor == 1 else f"{factor:g} times the"
