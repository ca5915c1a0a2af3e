"""What a policy asks of settings that were tuned without compression."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tagc.codecs.config import Strict, unit

Factor = Annotated[float, Field(gt=0, allow_inf_nan=False), unit("times dense's")]


class Tuning(Strict):
    """Factors between a dense run's settings and this policy's, as measured for an optimizer like
    Adam. They change nothing that is sent: `tagc.wrap` says them, plan and metrics repeat them.

    `rate_factor` times dense's learning rate is best. Gradients that the optimizer gets have
    `norm_factor` times the norm of dense ones, so that a limit for clipping must be multiplied by
    as much to act as often. `compressor.keep_rates(optimizer)` measures both, and then dense's
    settings can stay.
    """

    rate_factor: Factor = 1
    """Best learning rate, over dense's."""
    norm_factor: Factor | None = None
    """Norm of the gradients that the optimizer gets, over dense's; nothing is said of it without,
    as nobody has measured it."""

    @property
    def advice(self) -> str:
        """For people."""
        if self.rate_factor == self.norm_factor == 1:
            return "train at dense's own learning rate and limit for clipping"
        if self.rate_factor == 1 and self.norm_factor is None:
            return "train at dense's own learning rate"
        rate = _times(self.rate_factor)
        said = f"train at {rate} learning rate"
        if self.norm_factor == 1:
            said = f"{said}, and dense's own limit for clipping"
        elif self.norm_factor is not None:
            said = (
                f"{said}, and {_times(self.norm_factor)} limit for clipping, as the norm of its "
                "gradients is that many times dense's"
            )
        return f"{said}; or keep dense's, with compressor.keep_rates(optimizer)"


def _times(factor: float) -> str:
    return "dense's own" if factor == 1 else f"{factor:g} times dense's"
