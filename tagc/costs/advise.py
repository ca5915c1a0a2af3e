"""The text of advice: a table of all candidates, and whether compression pays."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tagc.basics.quantities import format_bandwidth, format_seconds
from tagc.costs.candidates import PAYS, Advisor, Question, dtype_name
from tagc.costs.quality import about_loss, loss_text, rate_text
from tagc.costs.training_memory import STATE_BYTES
from tagc.plan import format_bytes

# docs/kernels.md, "The host".
_CPU_TIME = (
    "- time of the CPU that starts a GPU's kernels: not included; on one slow machine policies "
    "added 2 to 4 ms per block and step, which lengthens the step if a block computes for less"
)


def report(advisor: Advisor) -> str:
    """The question, a table of all candidates, and whether compression pays."""
    q = advisor.question
    lines = [*_asked(q), f"- {advisor.about_codecs}"]
    if not q.gloo:  # there the CPU is the device, and its time is in the codecs'
        lines.append(_CPU_TIME)
    lines += [about_loss(ddp=q.ddp), "", *_table(advisor)]
    reasons = dict.fromkeys(advisor.refused.values())
    for why in reasons:
        lines.append(f"{', '.join(n for n, w in advisor.refused.items() if w == why)}: {why}")
    return "\n".join([*lines, "", *verdict(advisor)])


def verdict(advisor: Advisor) -> list[str]:
    """Sentences: the best policy, whether compression pays, and the bandwidth where it stops."""
    dense, other = advisor.best(dense=True, fitting=False), advisor.best(dense=False)
    faster = advisor.best(dense=False, fitting=False)
    assert dense is not None
    ddp = advisor.question.ddp
    if faster is None:
        return [f"No policy compresses anything in this model: stay with {dense.name}."]
    if not any(map(advisor.fits, advisor.candidates)):
        return [
            f"Nothing fits in {format_bytes(advisor.question.device_memory or 0)} a rank, "
            f"not even {dense.name}: shard "
            f"{'the model (fully_shard)' if ddp else 'over more ranks'}."
        ]
    if other is None:
        remedy = "over more ranks, or over more ranks on each host"
        return [
            "No policy fits in the memory that training itself leaves. Shard "
            f"{'the model (fully_shard)' if ddp else remedy}."
        ]
    saving = advisor.saving(other)
    step = "step" if advisor.question.compute else "time on the link"
    before, after = (format_seconds(advisor.cost(c).seconds) for c in (dense, other))
    if saving >= PAYS:
        lines = [
            f"Compression pays: {other.name} takes {after}, and {dense.name}, the best dense "
            f"form, takes {before}. The policy saves {saving:.0%} of the {step}."
        ]
    elif saving > 0:
        lines = [
            f"Compression does not pay: the best policy, {other.name}, saves {saving:.1%} of the "
            f"{step} of {dense.name} ({before}), less than {PAYS:.0%}."
        ]
    else:
        lines = [
            f"Compression does not pay: the best policy, {other.name}, takes {after}, and "
            f"{dense.name} takes {before}."
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
    elif last[1] == math.inf:
        lines.append(
            "Give a compute time (--step-time) to see the bandwidth at which compression stops "
            "paying."
        )
    else:
        lines.append(
            f"Compression stops paying at {format_bandwidth(last[1])}{advisor.proviso}: on faster "
            f"links no policy saves {PAYS:.0%} of the {step} ({last[0]} is the last that does)."
        )
    lines.append(
        f"This compares time only. {other.name}: loss {loss_text(other.name, ddp=ddp)}, learning "
        f"rate {rate_text(other.rate)} (docs/quality.md)."
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
    lines += _about_ddp(q) if q.ddp else _about_fsdp(q)
    if q.compute is None:
        lines.append("- compute time: not given, so this covers communication only")
    else:
        lines.append(
            f"- compute {format_seconds(q.compute)} a step, which can hide {q.overlap:.0%} of the "
            "communication (assumed; --overlap)"
        )
    return lines


def _about_fsdp(q: Question) -> Iterator[str]:
    yield (
        f"- gradients {dtype_name(q.dtype)} before compression, parameters gathered in "
        f"{dtype_name(q.parameter_dtype)}"
    )
    yield (
        f"- memory of a rank: {STATE_BYTES} bytes per sharded parameter (itself, gradient, Adam), "
        "FSDP's unsharded buffers, and the policy's memory; activations are not counted"
    )
    if q.micro_batches > 1:
        yield (
            f"- {q.micro_batches} micro-batches a step: each gathers and reduces, but if ranks of "
            "a host add up, hosts reduce once a step (set_requires_all_reduce(False))"
        )


def _about_ddp(q: Question) -> Iterator[str]:
    yield (
        f"- gradients {dtype_name(q.dtype)} before compression; dense is DDP's own all-reduce, for "
        "float32 parameters in bf16 with torch's bf16_compress_hook"
    )
    yield (
        f"- memory of a rank: {STATE_BYTES} bytes per parameter (itself, gradient, Adam), DDP's "
        "buckets, and the policy's memory; activations are not counted"
    )
    if q.micro_batches > 1:
        yield f"- {q.micro_batches} micro-batches a step, of which only the last reduces (no_sync)"


def _table(advisor: Advisor) -> list[str]:
    head = ("", "host sends", "link", "codec", "step", "vs best dense", "memory", "loss")
    rows: list[tuple[str, ...]] = [(*head, "learning rate")]
    for candidate in advisor.candidates:
        cost = advisor.cost(candidate)
        rows.append(
            (
                candidate.name,
                format_bytes(cost.wire_bytes),
                format_seconds(cost.link),
                format_seconds(cost.codec) if cost.codec else "-",
                format_seconds(cost.seconds),
                f"{0.0 - round(advisor.saving(candidate), 3):+.1%}",
                format_bytes(candidate.memory) + ("" if advisor.fits(candidate) else ", too much"),
                "" if candidate.dense else loss_text(candidate.name, ddp=advisor.question.ddp),
                "" if candidate.dense else rate_text(candidate.rate),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
