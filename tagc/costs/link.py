"""Bandwidth and latency between ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tagc.costs.traffic import Traffic

# gloo's own reduce-scatter sends as much as an all-reduce: twice the bytes it needs, at any size.
GLOO_REDUCE_SCATTER = 2.0


@dataclass(frozen=True, kw_only=True)
class Link:
    """Bandwidth and latency between ranks.

    Attributes:
        bandwidth: bytes/s that a host sends while all hosts send.
        latency: seconds per collective, on top of its bytes.
        reduce_scatter: seconds per byte of the backend's own reduce-scatter, relative to
            ``1 / bandwidth``; ``GLOO_REDUCE_SCATTER`` for gloo, which sends that many bytes.
        all_gather: the same for the backend's own all-gather. On gloo it often leaves one
            direction of a link idle.
        inside: bytes/s that a rank sends to other ranks of its host.
        ranks_per_host: ranks that share the host's link. In a ring (reduce-scatter, all-gather,
            all-reduce) only one rank's bytes cross it. Every rank's bytes cross it in an
            all-to-all, and between hosts whose ranks add up gradients first.
        groups: groups of such ranks that share the host's link, each with the same traffic.
    """

    bandwidth: float
    latency: float = 0.0
    reduce_scatter: float = 1.0
    all_gather: float = 1.0
    inside: float = math.inf
    ranks_per_host: int = 1
    groups: int = 1

    def seconds(self, traffic: Traffic, world_size: int) -> float:
        """Seconds of a unit's collectives, run one after the other."""
        idle = self.groups * (self.all_gather - 1) * traffic.gathered
        busy = self.carried(traffic, world_size)
        inside = traffic.inside / self.inside
        return traffic.collectives * self.latency + (busy + idle) / self.bandwidth + inside

    def carried(self, traffic: Traffic, world_size: int) -> float:
        """Bytes that leave a host over this link."""
        W, R = world_size, self.ranks_per_host
        crossing = R * (W - R) / (W - 1) if W > R else 1.0
        rings = traffic.reduced * self.reduce_scatter + traffic.gathered + traffic.ring
        return self.groups * (rings + traffic.all_to_all * crossing + traffic.across * R)
