"""The base of the plans of codecs that select."""

from __future__ import annotations

from dataclasses import dataclass

from tagc.codecs.plan import CodecPlan


@dataclass(frozen=True, kw_only=True)
class SelectingPlan(CodecPlan):
    """How groups of one segment are selected.

    Attributes:
        target: the density that the policy asks for.
    """

    target: float

    @property
    def density(self) -> float:
        """The target."""
        return self.target
