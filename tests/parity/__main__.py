"""Run the matrix and print its tables; exit status 1 if a case failed."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping

import torch

from . import __doc__ as about
from .apis import APIS
from .option import POLICIES
from .running import Case, Outcome, cases, quick_cases, run

_SIGNS = {"passed": "✓", "refused": "refused", "failed": "**FAILED**"}


def table(outcomes: Mapping[Case, Outcome]) -> str:
    """Markdown: for each API a row an option, dtype and number of ranks, a column a policy."""
    counts = Counter(outcome.kind for outcome in outcomes.values())
    lines = [
        "# Parity with native FSDP and DDP",
        "",
        f"{len(outcomes)} combinations with torch {torch.__version__.split('+')[0]} on CPU and "
        f"gloo: {counts['passed']} passed, {counts['refused']} refused with a message, "
        f"{counts['failed']} failed.",
    ]
    for api in APIS:
        rows: dict[tuple[str, str, int], dict[str, str]] = {}
        for case, outcome in outcomes.items():
            if case.api == api:
                row = rows.setdefault((case.option, case.dtype, case.ranks), {})
                row[case.policy] = _SIGNS[outcome.kind]
        lines += ["", f"## {api}", "", f"| option | dtype | ranks | {' | '.join(POLICIES)} |"]
        lines.append("|---|---|---|" + "---|" * len(POLICIES))
        for (option, dtype, ranks), row in rows.items():
            cells = " | ".join(row.get(policy, "") for policy in POLICIES)
            lines.append(f"| {option} | {dtype} | {ranks} | {cells} |")
    messages = {case.refused: o.said for case, o in outcomes.items() if o.kind == "refused"}
    lines += ["", "## What refusals say", ""]
    lines += [f"- {' '.join(said.split())}" for said in messages.values()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m parity", description=about)
    parser.add_argument("--quick", action="store_true")
    outcomes = run(quick_cases() if parser.parse_args().quick else cases())
    print(table(outcomes))
    for case, result in outcomes.items():
        if result.kind == "failed":
            print(f"{case}:\n{result.said}", file=sys.stderr)
    sys.exit(any(o.kind == "failed" for o in outcomes.values()))


if __name__ == "__main__":
    main()
