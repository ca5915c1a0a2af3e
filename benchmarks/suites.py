"""The suites and the command line that runs them: ``python -m benchmarks SUITE [options]``.

A suite is a module with ``about`` (one line of help), ``add_arguments(parser)``, ``run(args)``,
``table(records) -> str`` (Markdown) and perhaps ``plot(records, folder) -> Path``. ``run`` appends
its records to ``--json``, prints progress on stderr, and returns the records, which are printed, or
an exit status. They have the suite's name as ``suite``, by which ``report`` prints them again; one
that has ``failed`` makes the status 1.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from tagc.basics.plots import PlotsUnavailableError

from .records import read

# name -> module; imported only when requested.
SUITES = {
    "kernels": ".kernels",
    "quality": ".quality",
    "network": ".network.suite",
    "aggregate": ".aggregate",
    "dimensions": ".dimensions.training",
    "rank": ".rank",
    "host": ".host",
    "report": ".suites",
}

about = "tables and plots from the records of earlier runs"


def available() -> list[str]:
    """The suites available here: an installed package leaves out those that need the repository."""
    rooms = {name: f".{module.split('.')[1]}" for name, module in SUITES.items()}
    return [name for name, room in rooms.items() if importlib.util.find_spec(room, __package__)]


def load(name: str) -> ModuleType:
    """The module of a suite."""
    return importlib.import_module(SUITES[name], __package__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suite that the arguments name; return its exit status."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print(_usage())
        return 0
    if name not in available():
        print(f"unknown suite {name!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    suite = load(name)
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {name}", description=suite.about)
    suite.add_arguments(parser)
    args = parser.parse_args(rest)
    try:
        done = suite.run(args)
    except (PlotsUnavailableError, ValueError) as error:
        print(f"python -m benchmarks {name}: {error}", file=sys.stderr)
        return 2
    if isinstance(done, int):
        return done
    if done:
        print(suite.table(done) + "\n")
    return int(not done or any("failed" in record for record in done))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``report``."""
    add = parser.add_argument
    add("files", nargs="+", type=Path, help="records, such as those in benchmarks/results")
    add("--plots", type=Path, metavar="DIR", help="write plots there, as PNG")


def run(args: argparse.Namespace) -> int:
    """``report``: the table of every suite in the files; 1 if there was nothing to print."""
    try:
        records = read(args.files)
    except OSError as error:
        raise ValueError(error) from error
    printed = 0
    for name in dict.fromkeys(r.get("suite") for r in records):
        if name not in SUITES:
            print(f"no suite prints the records of {name!r}", file=sys.stderr)
            continue
        suite = load(name)
        mine = [r for r in records if r.get("suite") == name]
        print(suite.table(mine) + "\n")
        if args.plots and hasattr(suite, "plot"):
            print(f"wrote {suite.plot(mine, args.plots)}")
        printed += 1
    return 0 if printed else 1


def _usage() -> str:
    lines = ["usage: python -m benchmarks SUITE [options]", "", "suites:"]
    lines += [f"  {name:10} {load(name).about}" for name in available()]
    lines += ["", "python -m benchmarks SUITE --help lists the options of a suite."]
    return "\n".join(lines)
