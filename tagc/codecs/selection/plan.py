"""What the plans of codecs that select have in common."""

from __future__ import annotations

from dataclasses import dataclass

from tagc.codecs.plan import CodecPlan


@dataclass(frozen=True, kw_only=True)
class SelectingPlan(CodecPlan):
    """How one segment is selected from.

    Attributes:
        target: density that the policy asks for.
    """

    target: float

    @property
    def density(self) -> float:
        """The target."""
        return self.target
