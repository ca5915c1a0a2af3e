"""Counts of what sites have exchanged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from tagc.collect import SiteExchange, UnitReducer
from tagc.plan import format_bytes


@dataclass(frozen=True, kw_only=True)
class SiteMetrics:
    """Counts of one rank since ``tagc.sites``. ``str(metrics)`` is a table, :meth:`as_dict` is for
    loggers.

    Attributes:
        steps: optimizer steps, without those at a learning rate of 0.
        exchanges: exchanges of a fragment that were applied.
        wire_bytes: bytes that this rank sent to other sites.
        dense_bytes: bytes that an all-reduce of the gradients between sites in every optimizer step
            would have sent, in float32.
        waited: exchanges that training waited for; without delay, all.
        wait_seconds: how long it waited.
        failed: attempts to exchange that did not count, because a site died or did not answer.
        healed: how often this site continued from another one, also when it joined.
        residual_norm: Euclidean norm of this rank's residuals now.
    """

    steps: int
    exchanges: int
    wire_bytes: int
    dense_bytes: int
    waited: int
    wait_seconds: float
    failed: int
    healed: int
    residual_norm: float

    def as_dict(self) -> dict[str, float]:
        """All values by name, for loggers: ``wandb.log(metrics.as_dict())``."""
        return asdict(self)

    def __str__(self) -> str:
        ratio = f" ({self.dense_bytes / self.wire_bytes:.0f}x)" if self.wire_bytes else ""
        trouble = f", {self.failed} attempts failed" if self.failed else ""
        trouble += f", continued from another site {self.healed} times" if self.healed else ""
        return (
            f"steps {self.steps}, exchanges {self.exchanges}{trouble}\n"
            f"sent {format_bytes(self.wire_bytes)}; gradients in every step would be "
            f"{format_bytes(self.dense_bytes)}{ratio}\n"
            f"waited for {self.waited} exchanges, {self.wait_seconds:.2f} s\n"
            f"residual norm {self.residual_norm:.3g}"
        )


def collect_of_sites(reducers: Sequence[UnitReducer], exchange: SiteExchange) -> SiteMetrics:
    """Read the counters of all units, when nothing is in flight. Waits for the device."""
    norms = [
        torch.linalg.vector_norm(residual.float(), dtype=torch.float64).item()
        for reducer in reducers
        for residual in (*reducer.residuals.values(), *reducer.owner_residuals.values())
    ]
    dense = sum(r.plan.dense_bytes(r.plan.buffer_columns) for r in reducers)
    waits = exchange.waits
    return SiteMetrics(
        steps=exchange.steps,
        exchanges=waits.exchanges,
        wire_bytes=sum(r.wire_bytes for r in reducers),
        dense_bytes=int(dense * exchange.steps),
        waited=waits.waited,
        wait_seconds=waits.seconds,
        failed=waits.failed,
        healed=waits.healed,
        residual_norm=math.hypot(*norms),
    )
