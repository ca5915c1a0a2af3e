"""Predicts the seconds of a step, on the link and in codecs, from a plan.

A unit's collectives take ``latency * collectives + bytes / bandwidth``, and codecs take seconds per
element (:mod:`tagc.costs.speed`). A step takes ``compute + codec + link - hidden``, where
``hidden = min(overlap * link, compute)``: compute hides at most the share ``overlap`` of the
communication, and at most its own duration. Codecs are not hidden, because they use the cores or
the memory that compute uses. The step is one long after warm-up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from tagc.costs.speed import CodecTime, codec_seconds
from tagc.ops.program import Send
from tagc.plan import UnitPlan, sends_in_step

PAYS = 0.05
"""Compression pays if it saves this share of the seconds of the uncompressed form."""
# gloo's own reduce-scatter sends as much as an all-reduce: twice the bytes it needs, at any size.
GLOO_REDUCE_SCATTER = 2.0


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The number of collectives of a step, and the bytes that a rank sends in them."""

    collectives: int = 0
    reduced: float = 0.0  # in the backend's own reduce-scatter
    gathered: float = 0.0  # in the backend's own all-gather
    ring: float = 0.0  # in all-reduces, and in messages that are the same for all ranks
    all_to_all: float = 0.0  # in messages or cells that differ for each rank
    across: float = 0.0  # between hosts, to the ranks with the same place on them
    inside: float = 0.0  # to ranks of the same host

    def __add__(self, other: Traffic) -> Traffic:
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return Traffic(**sums)


def traffic(unit: UnitPlan, micro_batches: int = 1) -> Traffic:
    total = Traffic()
    for send, times in sends_in_step(unit, micro_batches):
        columns = send.columns
        numel = send.inp.numel if columns is None else sum(c.stop - c.start for c in columns)
        sent = times * send.bytes_for(numel)
        total += Traffic(collectives=times, **{_way(send): sent})
    return total


def _way(send: Send) -> str:
    """The field of :class:`Traffic` that counts a collective's bytes."""
    own = send.inp.dtype.is_floating_point
    if send.level != "flat":
        return send.level
    if send.kind == "reduce-scatter":
        # Cells go by all-to-all on gloo; NCCL's ring is no worse.
        return "reduced" if own else "all_to_all"
    if send.kind == "all-gather" and own:
        return "gathered"
    return "all_to_all" if send.kind == "all-to-all" else "ring"


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


def unit_seconds(unit: UnitPlan, link: Link, time: CodecTime, micro_batches: int = 1) -> float:
    sent = link.seconds(traffic(unit, micro_batches), unit.info.world_size)
    return sent + codec_seconds(unit, time, micro_batches)


@dataclass(frozen=True, kw_only=True)
class StepCost:
    compute: float  # without communication
    codec: float
    link: float
    overlap: float  # share of ``link`` that compute can hide, in [0, 1]
    wire_bytes: float  # that a host sends

    @property
    def hidden(self) -> float:
        """Seconds of communication that overlap with compute."""
        return min(self.overlap * self.link, self.compute)

    @property
    def seconds(self) -> float:
        return self.compute + self.codec + self.link - self.hidden
