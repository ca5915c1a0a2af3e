"""``report.md`` from what the parts have written so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .. import kernels
from ..compiled_table import table as compile_table
from ..records import Record, markdown, read
from .parts import Part


def write_report(
    out: Path, facts: dict[str, Any], todo: Sequence[Part], finished: dict[str, dict[str, Any]]
) -> None:
    """Write ``report.md``: the outcome of every part, then what each of them found."""
    sections = [
        "# GPU report",
        ", ".join(f"{key} {value}" for key, value in facts.items()),
        markdown(
            ["part", "what", "outcome", "seconds"],
            (
                [part.name, part.about, outcome["status"], outcome["seconds"]]
                if (outcome := finished.get(part.name))
                else [part.name, part.about, "not finished", ""]
                for part in todo
            ),
        ),
    ]
    for part in todo:
        outcome = finished.get(part.name, {})
        body = [f"## {part.name}", _found(part.name, out, outcome)]
        if "tail" in outcome:
            body.append(f"The end of its output:\n\n```text\n{outcome['tail']}\n```")
        sections += [text for text in body if text]
    text = "\n\n".join(sections) + "\n"
    # Never half a report, should this be the moment in which somebody ends the programme.
    (out / "report.tmp").write_text(text)
    (out / "report.tmp").replace(out / "report.md")


def _found(name: str, out: Path, outcome: dict[str, Any]) -> str:
    if name == "tests":
        return _tests(outcome)
    file, show = _SHOWS[name]
    records = read([out / file]) if (out / file).exists() else []
    text = show(records) if records else "Nothing was measured."
    if name == "kernels":
        text += "".join(f"\n\n![{p.stem}]({p.name})" for p in sorted(out.glob("kernels-*.png")))
    return text


def _tests(outcome: dict[str, Any]) -> str:
    if not outcome:
        return ""
    lines = [f"{outcome['passed']} passed, {len(outcome['failed'])} failed, "]
    lines[0] += f"{len(outcome['skipped'])} skipped"
    lines += [f"- {what}: `{test}`" for what in ("failed", "skipped") for test in outcome[what]]
    return "\n".join(lines)


def _training(records: Sequence[Record]) -> str:
    keys = ["parameters", "wrap_s", "step_ms", "first_step_ms", "density", "bytes_saved"]
    keys += ["unresolved"]

    def row(r: Record) -> list[object]:
        losses = r.get("losses")
        loss = f"{losses[0]} → {losses[-1]} in {r['steps']} steps" if losses else "-"
        return [r["run"], *(r.get(key, "-") for key in keys), loss, r["wrong"] or "none"]

    first = records[0]
    where = f"{first['ranks']} ranks on one {first['device']} device, {first['backend']}: "
    return (
        where
        + "every message goes through host memory, so times only compare with each other.\n\n"
        + markdown(["run", *keys, "loss", "error"], map(row, records))
        + "".join(f"\n\n{r['kernels'].strip('- ')}" for r in records if r.get("kernels"))
    )


_SHOWS: dict[str, tuple[str, Callable[[Sequence[Record]], str]]] = {
    "compile": ("compile.jsonl", compile_table),
    "kernels": ("kernels.jsonl", kernels.table),
    "fsdp2": ("fsdp2.jsonl", _training),
}
