"""Advice whether compression pays: a table of all candidates and a verdict, as text, as data for
JSON (bytes, seconds, bytes/s), and as a plot. And for sites: what a step takes if they exchange
changes of parameters once in many steps, or gradients in every step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tagc.basics.quantities import format_bandwidth, format_seconds
from tagc.costs.candidates import STATE_BYTES, Advisor, Candidate, Question, dtype_name
from tagc.costs.link import PAYS, Traffic, traffic
from tagc.costs.shapes import ModelError
from tagc.plan import AT_ONCE, aligned, format_bytes
from tagc.policy import Policy, PolicyError

# docs/kernels.md, "The host".
_CPU_TIME = (
    "- time of the CPU that starts a GPU's kernels: not included; on one slow machine policies "
    "added 2 to 4 ms per block and step, which lengthens the step if a block computes for less"
)
# Decades and points of a plot on each side of the bandwidth in question.
_DECADES, _POINTS = 2, 40

UNTUNED: dict[str, float] = {
    "attn-only": 0.007,
    "auto": 0.001,
    "hosts": -0.001,
    "hybrid": 0.001,
    "loco-4bit": -0.002,
    "one-bit": 0.004,
    "thrifty": 0.006,
    "two-bit": 0.0,
}
"""Change of the validation loss at the learning rate and clipping threshold of the uncompressed
run, a table of docs/quality.md. Policies that are not listed were not measured there."""
_UNTUNED = "in 150 steps of a GPT of 0.8 M parameters, one seed (seeds differ by 0.2%)"

WITH_DDP: dict[str, float] = {"loco-4bit": 0.0069, "one-bit": -0.0028}
"""The same with DDP, at the uncompressed run's best rate; ± 0.63% and ± 0.52%."""
_WITH_DDP = "with keep_rates, in 600 steps of a GPT of 0.14 M parameters, three seeds"


def advice_data(advisor: Advisor) -> dict[str, Any]:
    q = advisor.question
    dense, other = advisor.best(dense=True, fitting=False), advisor.best(dense=False)
    last = advisor.last_to_pay()
    limit = None
    if last is not None:
        limit = {"policy": last[0], "bandwidth": None if math.isinf(last[1]) else last[1]}
    return {
        "model": q.shapes.data,
        "ranks": q.world_size,
        "ranks_per_host": q.link.ranks_per_host,
        "replicas": q.replicas,
        "ddp": q.ddp,
        "bandwidth": q.link.bandwidth,
        "latency": q.link.latency,
        "compute": q.compute,
        "overlap": q.overlap,
        "codec_time": advisor.about_codecs,
        "candidates": [_row(advisor, candidate) for candidate in advisor.candidates],
        "refused": advisor.refused,
        "best_dense": None if dense is None else dense.name,
        "best_policy": None if other is None else other.name,
        "pays": other is not None and advisor.saving(other) >= PAYS,
        "pays_up_to": limit,
        "verdict": verdict(advisor),
    }


def _row(advisor: Advisor, candidate: Candidate) -> dict[str, Any]:
    """What the table and JSON tell of a candidate."""
    cost = advisor.cost(candidate)
    return {
        "name": candidate.name,
        "dense": candidate.dense,
        "host_sends": cost.wire_bytes,
        "link": cost.link,
        "codec": cost.codec,
        "step": cost.seconds,
        "saving": advisor.saving(candidate),
        "memory": candidate.memory,
        "fits": advisor.fits(candidate),
        "loss": _losses(advisor.question).get(candidate.name),
        "rate_factor": candidate.rate,
    }


def report(advisor: Advisor) -> str:
    """The question, a table of all candidates, and whether compression pays."""
    q = advisor.question
    lines = [*_asked(q), f"- {advisor.about_codecs}"]
    if not q.gloo:  # there the CPU is the device, and its time is in the codecs'
        lines.append(_CPU_TIME)
    lines.append(
        "- loss: its change at the learning rate of the uncompressed run, "
        f"{_WITH_DDP if q.ddp else _UNTUNED}; docs/quality.md"
    )
    lines += ["", *_table(advisor)]
    reasons = dict.fromkeys(advisor.refused.values())
    for why in reasons:
        lines.append(f"{', '.join(n for n, w in advisor.refused.items() if w == why)}: {why}")
    return "\n".join([*lines, "", *verdict(advisor)])


def _table(advisor: Advisor) -> list[str]:
    head = ("", "host sends", "link", "codec", "step", "vs best dense", "memory", "loss")
    lines: list[tuple[str, ...]] = [(*head, "learning rate")]
    for row in (_row(advisor, candidate) for candidate in advisor.candidates):
        about = ("", "")
        if not row["dense"]:
            about = (_loss_text(row["loss"]), _rate_text(row["rate_factor"]))
        lines.append(
            (
                row["name"],
                format_bytes(row["host_sends"]),
                format_seconds(row["link"]),
                format_seconds(row["codec"]) if row["codec"] else "-",
                format_seconds(row["step"]),
                f"{0.0 - round(row['saving'], 3):+.1%}",
                format_bytes(row["memory"]) + ("" if row["fits"] else ", too much"),
                *about,
            )
        )
    return aligned(lines)


def _losses(q: Question) -> dict[str, float]:
    return WITH_DDP if q.ddp else UNTUNED


def _loss_text(loss: float | None) -> str:
    return "not measured" if loss is None else f"{loss:+.1%}"


def _rate_text(factor: float | None) -> str:
    """What a policy asks of the learning rate; None if it does not say."""
    if factor is None:
        return "not measured"
    return "yours" if factor == 1 else f"{factor:g}× yours, or keep_rates"


def verdict(advisor: Advisor) -> list[str]:
    """Sentences: the best policy, whether compression pays, and the bandwidth where it stops."""
    dense, other = advisor.best(dense=True, fitting=False), advisor.best(dense=False)
    faster = advisor.best(dense=False, fitting=False)
    assert dense is not None
    q = advisor.question
    if faster is None:
        return [f"No policy compresses anything in this model: stay with {dense.name}."]
    if other is None:
        over = "the model (fully_shard)" if q.ddp else "over more ranks"
        if any(map(advisor.fits, advisor.candidates)):
            return [f"No policy fits in the memory that training itself leaves. Shard {over}."]
        room = format_bytes(q.device_memory or 0)
        return [f"Nothing fits in {room} a rank, not even {dense.name}: shard {over}."]
    saving = advisor.saving(other)
    step = "step" if q.compute else "time on the link"
    before, after = (format_seconds(advisor.cost(c).seconds) for c in (dense, other))
    pays, saved = "does not pay", f"less than {PAYS:.0%}"
    if saving >= PAYS:
        pays, saved = "pays", f"{saving:.0%}"
    lines = [
        f"Compression {pays}: {other.name} takes {after}, and {dense.name}, the best dense form, "
        f"takes {before}. The policy saves {saved} of the {step}."
    ]
    if other.written:
        lines.append(f"Write {other.name} as {other.written}.")
    if faster is not other:
        lines.append(
            f"{faster.name} would take {format_seconds(advisor.cost(faster).seconds)}, but needs "
            f"{format_bytes(faster.memory)} a rank: it does not fit."
        )
    last = advisor.last_to_pay()
    if last is None:
        lines.append("No policy pays at any bandwidth.")
    elif last[1] < math.inf:
        lines.append(
            f"Compression stops paying at {format_bandwidth(last[1])}{advisor.proviso}: on faster "
            f"links no policy saves {PAYS:.0%} of the {step} ({last[0]} is the last that does)."
        )
    loss = _loss_text(_losses(q).get(other.name))
    lines.append(
        f"This compares time only. {other.name}: loss {loss}, learning rate "
        f"{_rate_text(other.rate)} (docs/quality.md)."
    )
    return lines


def _asked(q: Question) -> list[str]:
    per_host = q.link.ranks_per_host
    hosts = f", {per_host} per host" if per_host > 1 else ""
    copies = f", {q.replicas} replicas of {q.world_size // q.replicas}" if q.replicas > 1 else ""
    link = f"{format_bandwidth(q.link.bandwidth)} and {format_seconds(q.link.latency)} a collective"
    ranks = f"{q.world_size} ranks{' of DDP' if q.ddp else ''}{hosts}{copies}"
    lines = [f"{q.shapes.numel:.3g} parameters, {len(q.shapes.blocks)} blocks; {ranks}; {link}"]
    if q.shard_link is not None:
        lines.append(f"- within a replica: {format_bandwidth(q.shard_link.bandwidth)}")
    if q.levels > 1:
        inside = "not counted" if q.link.inside == math.inf else format_bandwidth(q.link.inside)
        lines.append(
            f"- with a policy, the {q.levels} ranks of a host add up their gradients first; inside "
            f"a host: {inside}"
        )
    dtypes = f"- gradients {dtype_name(q.dtype)} before compression"
    state = f"- memory of a rank: {STATE_BYTES} bytes per"
    rest = "and the policy's memory; activations are not counted"
    batches = f"- {q.micro_batches} micro-batches a step"
    if q.ddp:
        lines += [
            f"{dtypes}; dense is DDP's own all-reduce, for float32 parameters in bf16 with torch's "
            "bf16_compress_hook",
            f"{state} parameter (itself, gradient, Adam), DDP's buckets, {rest}",
        ]
        batches += ", of which only the last reduces (no_sync)"
    else:
        lines += [
            f"{dtypes}, parameters gathered in {dtype_name(q.parameter_dtype)}",
            f"{state} sharded parameter (itself, gradient, Adam), FSDP's unsharded buffers, {rest}",
        ]
        batches += (
            ": each gathers and reduces, but if ranks of a host add up, hosts reduce once a step "
            "(set_requires_all_reduce(False))"
        )
    lines += [batches] if q.micro_batches > 1 else []
    if q.compute is None:
        lines.append("- compute time: not given (--step-time), so this covers communication only")
    else:
        lines.append(
            f"- compute {format_seconds(q.compute)} a step, which can hide {q.overlap:.0%} of the "
            "communication (assumed; --overlap)"
        )
    return lines


def draw(advisor: Advisor, pyplot: Any, file: str) -> None:
    """Draw the predicted step against the bandwidth between hosts, for every candidate that fits
    and whose plan does not depend on the link."""
    here = advisor.question.link.bandwidth
    steps = range(-_POINTS, _POINTS + 1)
    bandwidths = [here * 10 ** (_DECADES * i / _POINTS) for i in steps]
    figure, axis = pyplot.subplots(figsize=(8, 5))
    among = [c for c in advisor.candidates if advisor.fits(c) and not c.chosen]
    among.sort(key=lambda c: -advisor.cost(c).seconds)  # the legend has the order of the lines
    axis.set_prop_cycle(color=pyplot.get_cmap("tab20").colors)
    lines = iter(("--", "-", ":", "-."))
    for candidate in among:
        times = [advisor.cost(candidate, bandwidth).seconds for bandwidth in bandwidths]
        style = {"color": "black", "linestyle": next(lines, "-")} if candidate.dense else {}
        axis.plot([8 * b / 1e9 for b in bandwidths], times, label=candidate.name, **style)
    axis.axvline(8 * here / 1e9, color="gray", linewidth=0.8, label=format_bandwidth(here))
    axis.set(xscale="log", yscale="log", xlabel="bandwidth between hosts, Gbit/s")
    alone = advisor.question.compute is None
    axis.set_ylabel("time on the link, s" if alone else "predicted step, s")
    axis.grid(visible=True, which="major", alpha=0.3)
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    try:
        figure.savefig(file, dpi=110, bbox_inches="tight")
    except (OSError, ValueError) as error:  # no such folder, or a suffix that it does not know
        raise ModelError(f"cannot draw to {file}: {error}") from None
    finally:
        pyplot.close(figure)


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
            found.append(_cost(q, policy, policy.name))
        except ValueError as error:
            refused[policy.name] = str(error)
    return found, refused


def _cost(q: Question, policy: Policy, name: str) -> SiteCost:
    plan = q.plan(policy)
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
