"""The suites and the command line that runs them: ``python -m benchmarks SUITE [options]``.

A suite is a module with ``about`` (one line of help), ``add_arguments(parser)`` and
``run(args) -> int``, the exit status. One whose results ``report`` should draw again also has
``table(results) -> str`` (Markdown) and ``plots(results, folder) -> list[Path]``, for the records
that it wrote with its own name as ``suite``.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

from tagc.plots import PlotsUnavailableError

# name -> module; imported only when asked for.
SUITES = {
    "kernels": ".kernels",
    "gpu": ".gpu",
    "network": ".network",
    "scaling": ".scaling",
    "convergence": ".convergence",
    "paired": ".paired",
    "counts": ".counts",
    "ready": ".ready",
    "untuned": ".untuned",
    "soak": ".soak",
    "report": ".report",
}
_DEFAULT = "kernels"


def available() -> list[str]:
    """Suites that are here: an installed package leaves out what needs the repository."""
    return [name for name in SUITES if importlib.util.find_spec(SUITES[name], __package__)]


def load(name: str) -> ModuleType:
    """The module of a suite."""
    return importlib.import_module(SUITES[name], __package__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suite that the arguments name, ``kernels`` if none; its exit status."""
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
    try:
        return suite.run(parser.parse_args(rest))
    except PlotsUnavailableError as error:
        print(error, file=sys.stderr)
        return 2


def _usage() -> str:
    lines = ["usage: python -m benchmarks SUITE [options]", "", "suites:"]
    lines += [f"  {name:10} {load(name).about}" for name in available()]
    return "\n".join(lines)
