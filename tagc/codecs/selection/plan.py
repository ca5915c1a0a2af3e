"""What the plans of codecs that select have in common."""

from __future__ import annotations

from dataclasses import dataclass

from tagc.codecs.plan import CodecPlan


@dataclass(frozen=True, kw_only=True)
class SelectingPlan(CodecPlan):
    """How one segment is selected from.

    Attributes:
        target: density that the policy asks for.
        shared: whether all ranks keep what the shard's owner chose.
    """

    target: float
    shared: bool = False

    @property
    def density(self) -> float:
        """The target."""
        return self.target

    @property
    def has_shared_support(self) -> bool:
        """See :attr:`CodecPlan.has_shared_support`."""
        return self.shared

    def used_words(self, columns: int) -> int:
        """All of them where a choice rides along: what a rank chose for its own shard goes to
        all."""
        return self.words if self.shared else super().used_words(columns)
