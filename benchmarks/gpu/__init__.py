"""``gpu``: everything that is worth knowing about a GPU, by one command, in under eight minutes.

Parts, each a process of its own with a time limit: the GPU tests, what the kernels compile to, the
kernel benchmark, and training steps of FSDP2 on two ranks that share the GPU. A part that fails
or hangs takes nothing from the others. Each part prints its table, and ``report.md``, which is
written anew after each of them, has them all.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..machine import machine
from ..records import markdown

__all__ = ["about", "add_arguments", "run"]

about = "tests, compiled kernels, speed and training steps on a GPU, in one report"
# Of all parts together, in seconds.
LIMIT = 460.0
_ROOT = Path(__file__).parents[2]
_PACKAGE = __package__ or "benchmarks.gpu"
_TAIL = 30
# A test for a GPU: the mark, or the test of a file's kernel cases, which has it.
_FOR_A_GPU = re.compile(r"pytest\.mark\.gpu|\btest_on_a_gpu\b")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One process of the programme.

    Attributes:
        limit: seconds after which it is killed.
        background: runs beside the others, as it needs no GPU.
    """

    name: str
    about: str
    command: list[str]
    limit: float
    background: bool = False


class Running:
    """A part's process; its output goes to ``NAME.md``, its progress to ``NAME.log``."""

    def __init__(self, part: Part, out: Path) -> None:
        self.part = part
        self.output, self._log = out / f"{part.name}.md", out / f"{part.name}.log"
        self._started = time.monotonic()
        with self.output.open("w") as output, self._log.open("w") as log:
            self._process = subprocess.Popen(
                part.command, stdout=output, stderr=log, cwd=_ROOT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"}, start_new_session=True,
            )  # fmt: skip

    def finish(self, deadline: float) -> str:
        """Wait, until the part's limit or the deadline at the latest; what became of it."""
        limit = min(self._started + self.part.limit, deadline) - time.monotonic()
        try:
            code = self._process.wait(max(0.0, limit))
        except subprocess.TimeoutExpired:
            self.kill()
            return f"stopped after {time.monotonic() - self._started:.0f} s"
        return "passed" if code == 0 else f"failed with exit status {code}"

    def kill(self) -> None:
        """End the process and those that it started, if it still runs."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def said(self, outcome: str) -> str:
        """Its output, and where it did not pass, the end of its log."""
        found = self.output.read_text(errors="replace").strip() or "Nothing was printed."
        if outcome != "passed":
            tail = self._log.read_text(errors="replace").splitlines()[-_TAIL:]
            found += "\n\nThe end of its log:\n\n```text\n" + "\n".join(tail) + "\n```"
        return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this suite."""
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="an empty folder for all results"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda",
        help="cpu rehearses the programme with small inputs and the operators for CPUs",
    )  # fmt: skip
    parser.add_argument(
        "--only", nargs="+", metavar="PART", help="run only these: tests, compile, kernels, fsdp2"
    )


def run(args: argparse.Namespace) -> int:
    """Run all parts; 0 if all of them passed."""
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here; --device cpu rehearses the programme", file=sys.stderr)
        return 2
    out: Path = args.out.resolve()
    if out.exists() and any(out.iterdir()):
        print(f"{out} is not empty", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    todo = parts(args.device, out)
    if unknown := {*(args.only or ())} - {part.name for part in todo}:
        print(f"unknown part: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    return run_parts([p for p in todo if p.name in (args.only or [p.name])], args.device, out)


def run_parts(todo: Sequence[Part], device: str, out: Path) -> int:
    """Run parts, those in the background beside the others; 0 if all passed."""
    deadline = time.monotonic() + LIMIT
    facts = ", ".join(f"{key} {value}" for key, value in machine(device).items())
    outcomes: dict[str, str] = {}
    running: dict[str, Running] = {p.name: Running(p, out) for p in todo if p.background}
    try:
        for part in sorted(todo, key=lambda part: part.background):
            if not part.background:
                running[part.name] = Running(part, out)
            outcomes[part.name] = running[part.name].finish(deadline)
            print(f"{part.name}: {outcomes[part.name]}", flush=True)
            _write(out, facts, todo, outcomes, running)
    finally:  # also of an interrupt, which does not reach processes in sessions of their own
        for started in running.values():
            started.kill()
    print(f"wrote {out / 'report.md'}")
    return 0 if all(outcome == "passed" for outcome in outcomes.values()) else 1


def _write(
    out: Path, facts: str, todo: Sequence[Part], outcomes: dict[str, str],
    running: dict[str, Running],
) -> None:  # fmt: skip
    rows = [[part.name, part.about, outcomes.get(part.name, "not finished")] for part in todo]
    sections = ["# GPU report", facts, markdown(["part", "what", "outcome"], rows)]
    for name, outcome in outcomes.items():
        sections += [f"## {name}", running[name].said(outcome)]
    sections += [f"![{plot.stem}]({plot.name})" for plot in sorted(out.glob("*.png"))]
    # Never half a report, should this be the moment in which somebody ends the programme.
    (out / "report.tmp").write_text("\n\n".join(sections) + "\n")
    (out / "report.tmp").replace(out / "report.md")


def parts(device: str, out: Path) -> list[Part]:
    """The programme for a device; ``cpu`` is a rehearsal in which everything is small."""
    python, small = [sys.executable, "-m"], device == "cpu"
    suites = _PACKAGE.rpartition(".")[0]
    compile_ = [*python, f"{_PACKAGE}.compile", "--json", str(out / "compile.jsonl")]
    kernels = [*python, suites, "kernels", "--device", device]
    kernels += ["--json", str(out / "kernels.jsonl")]
    if importlib.util.find_spec("matplotlib"):
        kernels += ["--plots", str(out)]
    training = [*python, f"{_PACKAGE}.training", "--device", device]
    training += ["--json", str(out / "fsdp2.jsonl")]
    # A rehearsal measures nothing, so its parts may as well run all at once.
    return [
        Part(
            name="tests",
            about="`pytest -m gpu`",
            command=_pytest(small),
            limit=200,
            background=small,
        ),
        Part(
            name="compile",
            about="what the kernels compile to",
            command=[*compile_, *(["--rehearse"] if small else [])],
            limit=240,
            background=True,
        ),
        Part(
            name="kernels",
            about="the kernel benchmark",
            command=[
                *kernels,
                *(["--quick", "--sizes", "12"] if small else ["--time-limit", "130"]),
            ],
            limit=170,
            background=small,
        ),
        Part(
            name="fsdp2",
            about="training steps on two ranks that share the device, through gloo",
            command=[*training, *(["--rehearse"] if small else [])],
            limit=80,
            background=small,
        ),
    ]


def _pytest(small: bool) -> list[str]:
    """pytest fails where no test ran; its summary names what failed and what was skipped."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfEs", "--continue-on-collection-errors"]
    # A notice on import of torch where the package pynvml is installed; warnings are errors.
    command += ["-p", "no:cacheprovider", "-W", "ignore:The pynvml package is deprecated"]
    # A plugin that warns beside xdist, where it is installed.
    command += ["-p", "no:benchmark"]
    if small:
        return [*command, "tests/ops/test_symbols.py", "-m", "not gpu and not slow"]
    if importlib.util.find_spec("xdist"):
        command += ["-n", "4"]  # most of the time goes into compiling kernels
    # Only what has GPU tests: the others may need packages that a machine for this does not have.
    tests = sorted(_ROOT.glob("tests/**/test_*.py"))
    files = [path for path in tests if _FOR_A_GPU.search(path.read_text())]
    return [*command, *(str(p.relative_to(_ROOT)) for p in files), "-m", "gpu"]
