"""The kinds of feedback that a policy can ask for, as its YAML spells them."""

from typing import Annotated, Literal, Self

import torch
from pydantic import Field, model_validator

from tagc.codecs.config import Strict, unit


class FeedbackConfig(Strict):
    """What becomes of the part of a gradient that a codec did not send.

    `residual` keeps it per rank in `dtype` (`int8` has a scale for every 256 elements) and adds it
    to the next gradient; `average` (LoCo)
    keeps a moving average of it instead, `beta` of the old and `1 - beta` of the new, and starts
    from zero every `reset_steps`; `none` drops it.

    A codec that sends the share `lead` of what is owed delivers a gradient late, by
    `(1 - lead) / lead` steps on average, and lateness costs more than noise. With a `lead` below 1
    the owner undoes it: it hands out `(sent - (1 - lead) * sent before) / lead`. With `measured`
    every rank measures that share, segment by segment, in what it sends itself, on a sample of it.
    """

    kind: Literal["none", "residual", "average"] = "residual"
    """What is kept of what was not sent."""
    dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """In which it is stored: 4, 2 or about 1 bytes per element; not with kind none."""
    beta: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False), unit("share")] = 0.8
    """Share of the old in the moving average; kind average only."""
    reset_steps: Annotated[int, Field(ge=1, le=2**31 - 1), unit("reductions")] = 1024
    """After so many the moving average starts from zero; kind average only."""
    lead: (
        Annotated[float, Field(ge=0.05, le=1, allow_inf_nan=False), unit("share")]
        | Literal["measured"]
    ) = 1.0
    """Share of what is owed that the codec sends in a step, or `measured`; below 1 the owner undoes
    the lag; kind residual only."""

    @property
    def stored_dtype(self) -> torch.dtype:
        """`dtype`, as torch has it."""
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
                raise ValueError(f"{' and '.join(unused)}: only the kind {kind!r} has them")
        return self
