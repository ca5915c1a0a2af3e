"""What the kernels compile to, as records: ``python -m benchmarks.gpu.compile [--json FILE]``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..compiled import ARCHITECTURES, compile_all, rows
from ..compiled_table import table
from ..records import append


def main(argv: list[str] | None = None) -> int:
    """Compile for every architecture and print the table; 1 if anything spills."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.compile", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the rows there")
    parser.add_argument("--all", action="store_true", help="every combination of dtypes, not 1/4")
    parser.add_argument("--rehearse", action="store_true", help="a few kernels, one architecture")
    args = parser.parse_args(argv)
    records = []
    for turn, arch in enumerate(ARCHITECTURES[-1:] if args.rehearse else ARCHITECTURES):
        # Other combinations for each architecture: half of all of them between the two.
        share = 1 if args.all else 4
        kernels = (
            compile_all(arch, share=1 << 30, codecs=0)
            if args.rehearse
            else compile_all(arch, share=share, turn=2 * turn % share)
        )
        found = rows(kernels)
        for record in found:
            if args.json:
                append(args.json, {"suite": "compile"} | record)
        records += found
    print(table(records))
    return 1 if any(record["spilled"][1] for record in records) else 0


if __name__ == "__main__":
    sys.exit(main())
