"""Run the matrix and print its tables; exit status 1 if a case failed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

import torch

from . import __doc__ as about
from .apis import APIS
from .cases import Case, cases, quick_cases
from .option import DTYPES, POLICIES
from .running import Outcome, run

_SIGNS = {"passed": "✓", "refused": "refused", "failed": "**FAILED**"}


def table(outcomes: Mapping[Case, Outcome], default_dtype: str = "float32") -> str:
    """Markdown: a row an option, dtype and number of ranks, a column a policy."""
    lines: list[str] = []
    counts = {kind: sum(o.kind == kind for o in outcomes.values()) for kind in _SIGNS}
    lines += ["# Parity with native FSDP and DDP", ""]
    lines.append(
        f"{len(outcomes)} combinations: {counts['passed']} passed, {counts['refused']} refused "
        f"with a message, {counts['failed']} failed. Printed by `{_command(default_dtype)}` with "
        f"torch {torch.__version__.split('+')[0]} on CPU and gloo. A case with policy `dense` "
        "passes if it has the bits of native FSDP. (On hosts of two ranks, and with DDP, sums are "
        "added in another order, and must agree within their rounding.) With every other policy, "
        "the gradients handed out plus the residuals of all ranks must add up to the native "
        "gradients. "
        "[tests/parity](../tests/parity/__init__.py) has the details, and explains the names of "
        "options and policies."
    )
    numbered: dict[str, None] = {}
    for api in APIS:
        mine = {case: o for case, o in outcomes.items() if case.api == api}
        lines += ["", f"## {api}", "", f"| option | dtype | ranks | {' | '.join(POLICIES)} |"]
        lines.append("|---|---|---|" + "---|" * len(POLICIES))
        rows: dict[tuple[str, str, int], dict[str, str]] = {}
        for case, result in mine.items():
            row = rows.setdefault((case.option, case.dtype, case.ranks), {})
            row[case.policy] = _SIGNS[result.kind]
            if result.kind == "refused":
                number = list(numbered).index(key) + 1 if (key := case.refused) in numbered else 0
                if not number:
                    numbered[key] = None
                    number = len(numbered)
                row[case.policy] += f" [{number}]"
        order = list(APIS[api].options)
        for (option, dtype, ranks), row in sorted(
            rows.items(), key=lambda r: (list(DTYPES).index(r[0][1]), order.index(r[0][0]), r[0][2])
        ):
            size = "2 × 2" if APIS[api].replicas > 1 else str(ranks)
            cells = " | ".join(row.get(policy, "") for policy in POLICIES)
            lines.append(f"| {option} | {dtype} | {size} | {cells} |")
    messages = {case.refused: o.said for case, o in outcomes.items() if o.kind == "refused"}
    lines += ["", "## What refusals say", ""]
    lines += [f"{i}. {' '.join(messages[key].split())}" for i, key in enumerate(numbered, 1)]
    return "\n".join(lines)


def _command(default_dtype: str) -> str:
    if default_dtype == "float32":
        return "make parity"
    return f"PYTHONPATH=tests python -m parity --default-dtype {default_dtype}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m parity", description=about)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--default-dtype",
        choices=["float32", "bfloat16", "float64"],
        default="float32",
        help="torch.set_default_dtype on all ranks",
    )
    args = parser.parse_args()
    outcomes = run(quick_cases() if args.quick else cases(), args.default_dtype)
    print(table(outcomes, args.default_dtype))
    for case, result in outcomes.items():
        if result.kind == "failed":
            print(f"{case}:\n{result.said}", file=sys.stderr)
    sys.exit(any(o.kind == "failed" for o in outcomes.values()))


if __name__ == "__main__":
    main()
