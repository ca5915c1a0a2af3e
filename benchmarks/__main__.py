"""Command line: ``python -m benchmarks kernels [--json FILE]``, or ``network``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks import kernels
from benchmarks.timing import machine

# name -> (run, table)
SUITES = {"kernels": (kernels.run, kernels.table)}


def main(argv: list[str] | None = None) -> int:
    """Run a suite, print its table, and append its results as JSON lines if asked."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["network"]:
        return _network(argv[1:])
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("suite", nargs="?", choices=SUITES, default="kernels")
    parser.add_argument("--json", type=Path, help="append the results to this file, a line each")
    args = parser.parse_args(argv)
    run, table = SUITES[args.suite]
    facts = machine() | {"command": " ".join(["python -m benchmarks", *argv])}
    print(", ".join(f"{k} {v}" for k, v in facts.items()))
    results = []
    for result in run():
        results.append(result)
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps({"suite": args.suite} | facts | result) + "\n")
    print("\n" + table(results))
    return 0


def _network(argv: list[str]) -> int:
    from benchmarks import network

    parser = argparse.ArgumentParser(prog="python -m benchmarks network", description=network.about)
    network.add_arguments(parser)
    return network.run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
