"""Advice for sites: what a step takes if they exchange changes of parameters once in many steps, or
gradients in every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tagc.basics.quantities import format_bandwidth, format_seconds
from tagc.costs.candidates import Question
from tagc.costs.explain import plan_sites
from tagc.costs.link import Traffic, traffic
from tagc.plan import AT_ONCE, aligned, format_bytes
from tagc.policy import Policy, PolicyError
from tagc.policy.rules import check_lead


@dataclass(frozen=True, kw_only=True)
class SiteCost:
    """What a policy costs between sites, on average over optimizer steps."""

    name: str
    every: int  # optimizer steps between two exchanges of the same parameters; 1 for gradients
    wire_bytes: float  # that a site sends in an optimizer step
    link: float  # seconds on the link
    waits: float  # seconds of these that training waits
    seconds: float  # the whole step
    memory: int  # bytes of a rank, for anchors, residuals and buffers


def site_costs(q: Question, policies: Sequence[Policy]) -> tuple[list[SiteCost], dict[str, str]]:
    """The costs of dense gradients in bfloat16 in every step, and of policies; and why others are
    left out, by name."""
    bf16 = {"when": {}, "codec": {"kind": "dense", "wire": "bfloat16"}}
    found = [_cost(q, Policy.load({"schema": 1, "gradients": [bf16]}), "dense bf16")]
    refused: dict[str, str] = {}
    for policy in policies:
        try:
            if policy.replicas:
                raise PolicyError("it has rules for replicas")
            for rule in policy.gradients:
                check_lead(rule)
            found.append(_cost(q, policy, policy.name))
        except ValueError as error:
            refused[policy.name] = str(error)
    return found, refused


def _cost(q: Question, policy: Policy, name: str) -> SiteCost:
    plan = plan_sites(q.shapes, policy, world_size=q.world_size, sites=q.sites)
    traffics = [traffic(unit) for unit in plan.units]
    total = sum(traffics, Traffic())
    sent = q.link.carried(total, q.sites) * (q.world_size // q.sites)
    compute, latency = q.compute or 0.0, q.link.latency
    exchange = sent / q.link.bandwidth
    if policy.sites is None:
        exchange += total.collectives * latency
        every, waits = 1, exchange - min(q.overlap * exchange, compute)
    else:
        config, every = policy.sites, policy.sites.every
        # Units that are exchanged at once wait for the link together, but not for units of another
        # fragment; and each fragment's anchors are compared in a collective of its own.
        # Uncompressed units go one after another.
        together = sum(
            t.collectives * (min(1.0, u.buffer_columns / AT_ONCE) if u.compressed else 1.0)
            for t, u in zip(traffics, plan.units, strict=True)
        )
        alone = config.fragments * max(t.collectives for t in traffics)
        exchange += (config.fragments + max(together, alone)) * latency
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


def site_report(q: Question, costs: Sequence[SiteCost], refused: dict[str, str]) -> str:
    compute = "" if q.compute is None else f"; compute {format_seconds(q.compute)} a step"
    lines = [
        f"{q.shapes.numel:.3g} parameters; {q.sites} sites of {q.world_size // q.sites} ranks; "
        f"{format_bandwidth(q.link.bandwidth)} and {format_seconds(q.link.latency)} a collective "
        f"between sites{compute}",
        "- every: optimizer steps between two exchanges; 1 sends gradients in every step",
        "- codec time and traffic inside a site are not included",
    ]
    if q.compute is None:
        lines.append("- compute time: not given, so nothing hides behind it (--step-time)")
    rows = [("", "every", "site sends", "link", "waits", "of the step", "memory")]
    for cost in costs:
        rows.append(
            (
                cost.name,
                str(cost.every),
                format_bytes(cost.wire_bytes),
                format_seconds(cost.link),
                format_seconds(cost.waits),
                f"{cost.waits / cost.seconds:.1%}" if q.compute and cost.seconds else "-",
                format_bytes(cost.memory),
            )
        )
    best = min(costs, key=lambda cost: (cost.seconds, cost.wire_bytes))
    return "\n".join(
        [
            *lines,
            "",
            *aligned(rows),
            *(f"{name}: {why}" for name, why in refused.items()),
            "",
            f"{best.name} waits least: {format_seconds(best.waits)} of a step.",
            "This covers time only; docs/sites.md shows the effect on the loss.",
        ]
    )
