"""Advice for sites: what a step takes if they exchange changes of parameters once in many steps, or
gradients in every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tagc.basics.quantities import format_bandwidth, format_seconds
from tagc.costs.link import Link
from tagc.costs.shapes import ModelShapes
from tagc.costs.traffic import Traffic, traffic
from tagc.plan import AT_ONCE, between_sites, build_plan, format_bytes
from tagc.policy import Policy, PolicyError
from tagc.policy.rules import check_lead


@dataclass(frozen=True, kw_only=True)
class SiteQuestion:
    """A setup of several sites.

    Attributes:
        world_size: total number of ranks, divided equally among the sites.
        bandwidth: bytes/s that a site sends while all sites send.
        latency: seconds per collective between sites.
        compute: seconds of a step without traffic between sites; None if unknown.
        overlap: share of an exchange of gradients that compute can hide.
    """

    shapes: ModelShapes
    world_size: int
    sites: int
    bandwidth: float
    latency: float
    compute: float | None
    overlap: float

    @property
    def ranks_per_site(self) -> int:
        """Ranks that share the link of a site."""
        return self.world_size // self.sites


@dataclass(frozen=True, kw_only=True)
class SiteCost:
    """What a policy costs between sites, on average over optimizer steps.

    Attributes:
        every: optimizer steps between two exchanges of the same parameters; 1 for gradients.
        wire_bytes: bytes that a site sends in an optimizer step.
        link: seconds on the link.
        waits: seconds of these that training waits.
        seconds: the whole step.
        memory: bytes of a rank's memory for anchors, residuals and buffers.
    """

    name: str
    every: int
    wire_bytes: float
    link: float
    waits: float
    seconds: float
    memory: int


def site_costs(
    question: SiteQuestion, policies: Sequence[Policy]
) -> tuple[list[SiteCost], dict[str, str]]:
    """The costs of dense gradients in bfloat16 in every step, and of policies; and why others are
    left out, by name."""
    bf16 = {
        "schema": 1,
        "gradients": [{"when": {}, "codec": {"kind": "dense", "wire": "bfloat16"}}],
    }
    found = [_cost(question, Policy.load(bf16), "dense bf16")]
    refused: dict[str, str] = {}
    for policy in policies:
        try:
            if policy.replicas:
                raise PolicyError("it has rules for replicas")
            for rule in policy.gradients:
                check_lead(rule)
            found.append(_cost(question, policy, policy.name))
        except ValueError as error:
            refused[policy.name] = str(error)
    return found, refused


def _cost(question: SiteQuestion, policy: Policy, name: str) -> SiteCost:
    q = question
    units, _ = q.shapes.units(q.ranks_per_site, torch.float32, torch.float32)
    held = [between_sites(unit, q.sites) for unit in units if unit.params]
    plan = build_plan(held, policy)
    traffics = [traffic(unit) for unit in plan.units]
    total = sum(traffics, Traffic())
    link = Link(bandwidth=q.bandwidth, latency=q.latency)
    sent = link.carried(total, q.sites) * q.ranks_per_site
    compute = q.compute or 0.0
    exchange = sent / q.bandwidth
    if policy.sites is None:
        exchange += total.collectives * q.latency
        every, waits = 1, exchange - min(q.overlap * exchange, compute)
    else:
        config, every = policy.sites, policy.sites.every
        # Units that are exchanged at once wait for the link together, but not for units of another
        # fragment; and each fragment's anchors are compared in a collective of its own.
        # Uncompressed units go one after another.
        pairs = zip(traffics, plan.units, strict=True)
        together = sum(
            t.collectives * (min(1.0, u.buffer_columns / AT_ONCE) if u.compressed else 1.0)
            for t, u in pairs
        )
        alone = config.fragments * max(t.collectives for t in traffics)
        exchange += (config.fragments + max(together, alone)) * q.latency
        late = max(0.0, exchange / config.fragments - config.delay * compute)
        waits = late * config.fragments / every
    return SiteCost(
        name=name,
        every=every,
        wire_bytes=sent / every,
        link=exchange / every,
        waits=waits,
        seconds=compute + waits,
        memory=plan.memory.peak,
    )


def site_report(question: SiteQuestion, costs: Sequence[SiteCost], refused: dict[str, str]) -> str:
    """The question and a table, as text."""
    q = question
    compute = "" if q.compute is None else f"; compute {format_seconds(q.compute)} a step"
    lines = [
        f"{q.shapes.numel:.3g} parameters; {q.sites} sites of {q.ranks_per_site} ranks; "
        f"{format_bandwidth(q.bandwidth)} and {format_seconds(q.latency)} a collective between "
        f"sites{compute}",
        "- every: optimizer steps between two exchanges; 1 sends gradients in every step",
        "- codec time and traffic inside a site are not included",
    ]
    if q.compute is None:
        lines.append("- compute time: not given, so nothing hides behind it (--step-time)")
    lines.append("")
    rows = [("", "every", "site sends", "link", "waits", "of the step", "memory")]
    for cost in costs:
        share = f"{cost.waits / cost.seconds:.1%}" if q.compute and cost.seconds else "-"
        rows.append(
            (
                cost.name,
                str(cost.every),
                format_bytes(cost.wire_bytes),
                format_seconds(cost.link),
                format_seconds(cost.waits),
                share,
                format_bytes(cost.memory),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines += [f"{name}: {why}" for name, why in refused.items()]
    best = min(costs, key=lambda cost: (cost.seconds, cost.wire_bytes))
    lines += [
        "",
        f"{best.name} waits least: {format_seconds(best.waits)} of a step.",
        "This covers time only; docs/sites.md shows the effect on the loss.",
    ]
    return "\n".join(lines)


def site_data(costs: Sequence[SiteCost], refused: dict[str, str]) -> dict[str, Any]:
    """The same as data for JSON, in bytes and seconds."""
    return {"candidates": [asdict(cost) for cost in costs], "refused": refused}
