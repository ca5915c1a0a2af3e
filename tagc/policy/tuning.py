"""How a policy changes the best learning rate and clipping limit of a dense run."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tagc.codecs.config import Strict, unit

Factor = Annotated[float, Field(ge=0.001, le=1000), unit("times the uncompressed run's")]


class Tuning(Strict):
    """Factors from a dense run's settings to this policy's, measured for optimizers like Adam. They
    do not change what is sent: `tagc.wrap` prints them; plan and metrics repeat them.

    `rate_factor` times dense's learning rate is best. The gradients that the optimizer gets have
    `norm_factor` times the norm of dense ones, so multiply a clipping limit by `norm_factor` to
    clip as often. `compressor.keep_rates(optimizer)` measures both; you can then keep dense's
    settings.
    """

    rate_factor: Factor = 1
    """Best learning rate, over dense's."""
    norm_factor: Factor | None = None
    """Norm of the gradients that the optimizer gets, over dense's. None means that it was not
    measured; no hint about clipping is then printed."""

    @property
    def advice(self) -> str:
        """The hint for users, as one sentence."""
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
