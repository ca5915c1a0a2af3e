"""What the model behind ``tagc advise`` says about the cells that were measured.

A step is predicted from what ``advise`` is given or measures itself: the compute of a step (here
the same method's on the unlimited link, codecs included), the bytes of each direction, and what the
link does: the rate of messages, how much slower gloo's own all-gather is, and the latency of a
collective. Nothing overlaps on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.network.ledger import GRADIENTS, PARAMETERS
from benchmarks.network.methods import METHODS
from tagc.costs import GLOO_REDUCE_SCATTER, Link, Traffic

Cell = Mapping[str, Any]


def link_of(probe: Cell) -> Link:
    """The link as :func:`tagc.auto.measure_link` would describe it, from its probe."""
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
    gradients, parameters = sent.get(GRADIENTS, 0.0), sent.get(PARAMETERS, 0.0)
    native_gather = "all_gather" in cell["collectives"]
    native_reduce = "reduce_scatter" in cell["collectives"]
    return Traffic(
        collectives=_exchanges(cell["collectives"]),
        reduced=gradients if native_reduce else 0.0,
        gathered=parameters if native_gather else 0.0,
        all_to_all=(0.0 if native_reduce else gradients) + (0.0 if native_gather else parameters),
    )


def _exchanges(counts: Mapping[str, float]) -> int:
    # An exchange by messages is a receive and a send for every other rank.
    messages = counts.get("send", 0.0)
    return round(sum(n for kind, n in counts.items() if kind not in ("send", "receive")) + messages)


def predicted_seconds(
    method: str, cell: Cell, unlimited: Cell, probe: Cell, ranks: int
) -> float | None:
    """A step of the cell, or None where the model says nothing (FSDP1, gloo's all-to-all)."""
    fsdp1 = method in METHODS and METHODS[method].sharding == "fsdp1"
    if fsdp1 or "all_to_all" in cell["collectives"]:
        return None
    return unlimited["compute_seconds"] + link_of(probe).seconds(traffic_of(cell), ranks)
