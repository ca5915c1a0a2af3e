"""How fast ranks reach each other."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tagc.costs.traffic import Traffic

# gloo's own reduce-scatter sends what an all-reduce would: twice what it must, at any size.
GLOO_REDUCE_SCATTER = 2.0


@dataclass(frozen=True, kw_only=True)
class Link:
    """How fast ranks reach each other.

    Attributes:
        bandwidth: bytes/s that a host sends while all hosts do.
        latency: seconds per collective, on top of its bytes.
        reduce_scatter: seconds per byte of the backend's own reduce-scatter, relative to
            ``1 / bandwidth``; ``GLOO_REDUCE_SCATTER`` for gloo, which sends that many bytes.
        all_gather: likewise of its own all-gather, which on gloo often leaves one direction of a
            link idle.
        inside: bytes/s that a rank sends to those of its own host.
        ranks_per_host: ranks that share the host's link. Rings (reduce-scatter, all-gather,
            all-reduce) cross it with one rank's bytes; in an all-to-all every rank crosses it, and
            so it does between hosts whose ranks add up first.
    """

    bandwidth: float
    latency: float = 0.0
    reduce_scatter: float = 1.0
    all_gather: float = 1.0
    inside: float = math.inf
    ranks_per_host: int = 1

    def seconds(self, traffic: Traffic, world_size: int) -> float:
        """Seconds of a unit's collectives, one after the other."""
        idle = (self.all_gather - 1) * traffic.gathered
        busy = self.carried(traffic, world_size)
        inside = traffic.inside / self.inside
        return traffic.collectives * self.latency + (busy + idle) / self.bandwidth + inside

    def carried(self, traffic: Traffic, world_size: int) -> float:
        """Bytes that leave a host over this link."""
        W, R = world_size, self.ranks_per_host
        crossing = R * (W - R) / (W - 1) if W > R else 1.0
        rings = traffic.reduced * self.reduce_scatter + traffic.gathered + traffic.ring
        return rings + traffic.all_to_all * crossing + traffic.across * R
