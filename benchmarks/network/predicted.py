"""What the model behind ``tagc advise`` says about the cells that were measured.

A step on a link is the same method's step on the unlimited link of the same pass, with its compute,
its codecs and the ranks' waiting for each other, and what its bytes take longer there. Bytes are
those of each direction; the link is the rate of messages, and how much slower gloo's own all-gather
is. What the benchmark's token bucket saves up while ranks compute goes at once. Nothing overlaps on
a CPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tagc.costs import Link, Traffic
from tagc.costs.link import GLOO_REDUCE_SCATTER

from .namespaces import Rate

Cell = Mapping[str, Any]


def link_of(probe: Cell) -> Link:
    """The link as :func:`tagc.costs.auto.measure_link` would describe it, from its probe."""
    bandwidth = probe["exchange_rate"] / 8
    return Link(
        bandwidth=bandwidth,
        latency=probe["exchange_latency"],
        reduce_scatter=GLOO_REDUCE_SCATTER,
        all_gather=probe["exchange_rate"] / probe["all_gather_rate"],
    )


def traffic_of(cell: Cell) -> Traffic:
    """Payload of a step, by the kind of collective that it takes."""
    sent = cell["payload_bytes"]
    gradients, parameters = sent.get("gradients", 0.0), sent.get("parameters", 0.0)
    native_gather = "all_gather" in cell["collectives"]
    native_reduce = "reduce_scatter" in cell["collectives"]
    return Traffic(
        collectives=round(_exchanges(cell["collectives"])),
        reduced=gradients if native_reduce else 0.0,
        gathered=parameters if native_gather else 0.0,
        all_to_all=(0.0 if native_reduce else gradients) + (0.0 if native_gather else parameters),
    )


def _exchanges(counts: Mapping[str, float]) -> float:
    # An exchange by messages is a receive and a send for every other rank.
    messages = counts.get("send", 0.0)
    return sum(n for kind, n in counts.items() if kind not in ("send", "receive")) + messages


def predicted_seconds(
    method: str, cell: Cell, unlimited: Cell, probe: Cell, unlimited_probe: Cell, ranks: int
) -> float | None:
    """A step of the cell, or None where the model says nothing: FSDP1 and gloo's all-to-all, which
    older records have."""
    if method.startswith("fsdp1") or "all_to_all" in cell["collectives"]:
        return None
    sent, compute = traffic_of(cell), unlimited["compute_seconds"]
    # What a collective costs whatever its size is in the step without a limit.
    here, there = (
        replace(link_of(p), latency=0.0).seconds(sent, ranks) for p in (probe, unlimited_probe)
    )
    here -= _saved_seconds(Rate.parse(cell["key"]["rate"]), cell["collectives"], compute, ranks)
    waited = statistics.median(unlimited["communication_seconds"])
    return compute + waited + max(0.0, here - there)


def _saved_seconds(
    rate: Rate, collectives: Mapping[str, float], compute: float, ranks: int
) -> float:
    """Time on the link that a token bucket spares: full at every exchange, if the rank computed
    long enough before it."""
    if rate.bits_per_second is None:
        return 0.0
    sends = collectives.get("send", 0.0)
    exchanges = _exchanges(collectives) - sends + sends / (ranks - 1)
    return min(8 * rate.burst * exchanges / rate.bits_per_second, compute)
