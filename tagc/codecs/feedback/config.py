"""The kinds of feedback that a policy can ask for, as its YAML spells them."""

from typing import Annotated, Literal, Self

import torch
from pydantic import Field, model_validator

from tagc.codecs.config import Strict, unit


class FeedbackConfig(Strict):
    """What happens to the part of a gradient that a codec did not send.

    `residual` keeps it on each rank in `dtype` and adds it to the next gradient. `average` (LoCo)
    keeps a moving average of it instead, with weight `beta` for the old value and `1 - beta` for
    the new one, and restarts from zero every `reset_steps` reductions. `none` drops it.

    If a codec sends the share `lead` of gradient plus residual, gradients arrive late, by
    `(1 - lead) / lead` steps on average, and lateness costs more than noise. With a `lead` below 1
    the owner undoes the lag: it hands out `(sent - (1 - lead) * sent before) / lead`. With
    `measured`, each rank measures the share of every segment on a sample of what it sends.
    """

    kind: Literal["none", "residual", "average"] = "residual"
    """Whether what was not sent is kept, averaged or dropped."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the stored residual: 4 or 2 bytes per element; not with kind none."""
    beta: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False), unit("share")] = 0.8
    """Weight of the old value in the moving average; kind average only."""
    reset_steps: Annotated[int, Field(ge=1, le=2**31 - 1), unit("reductions")] = 1024
    """After how many reductions the moving average restarts from zero; kind average only."""
    lead: (
        Annotated[float, Field(ge=0.05, le=1, allow_inf_nan=False), unit("share")]
        | Literal["measured"]
    ) = 1.0
    """Share of gradient plus residual that the codec sends in a step, or `measured`; below 1 the
    owner undoes the lag; kind residual only."""

    @property
    def stored_dtype(self) -> torch.dtype:
        """`dtype` as a torch dtype."""
        return getattr(torch, self.dtype)

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
