"""Run the matrix and print its tables; exit status 1 if a case failed."""

from __future__ import annotations

import argparse
import sys

from . import __doc__ as about
from .cases import cases, quick_cases
from .running import run
from .tables import table


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
