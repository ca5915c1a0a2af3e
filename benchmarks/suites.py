"""The suites and the command line that runs them: ``python -m benchmarks SUITE [options]``.

A suite is a module with ``about`` (one line of help), ``add_arguments(parser)`` and
``run(args) -> int``, the exit status. It appends its records to ``--json``, prints a table on
stdout and progress on stderr, and writes plots to ``--plots``. ``report`` draws its records again
with its ``table(records) -> str`` (Markdown) and, if it has plots, ``plots(records, folder) ->
list[Path]``. Its records have its name as ``suite``.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

from tagc.basics.plots import PlotsUnavailableError, pyplot

# name -> module; imported only when requested.
SUITES = {
    "kernels": ".kernels",
    "quality": ".quality",
    "network": ".network",
    "aggregate": ".network.aggregate",
    "dimensions": ".dimensions",
    "rank": ".rank",
    "host": ".host",
    "soak": ".soak",
    "structure": ".structure",
    "report": ".report",
}
_DEFAULT = "kernels"


def available() -> list[str]:
    """The suites available here: an installed package leaves out those that need the repository."""
    return [name for name in SUITES if importlib.util.find_spec(SUITES[name], __package__)]


def load(name: str) -> ModuleType:
    """The module of a suite."""
    return importlib.import_module(SUITES[name], __package__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suite that the arguments name (default ``kernels``); return its exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        if argv:
            print(_usage())
            return 0
        argv = [_DEFAULT]
    name, *rest = argv
    if name not in available():
        print(f"unknown suite {name!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    suite = load(name)
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {name}", description=suite.about)
    suite.add_arguments(parser)
    args = parser.parse_args(rest)
    try:
        if getattr(args, "plots", None):
            pyplot()  # before hours of work, not after
        return suite.run(args)
    except PlotsUnavailableError as error:
        print(error, file=sys.stderr)
        return 2


def _usage() -> str:
    lines = ["usage: python -m benchmarks SUITE [options]", "", "suites:"]
    lines += [f"  {name:9} {load(name).about}" for name in available()]
    lines += ["", "python -m benchmarks SUITE --help lists the options of a suite."]
    return "\n".join(lines)
