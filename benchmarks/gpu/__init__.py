"""``gpu``: the GPU tests, the kernel benchmark and training steps of FSDP2, in under eight minutes.

Each part is a process of its own with a time limit, one after the other, and writes a section of
``report.md``. A part that fails or hangs takes nothing from the others.
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

__all__ = ["about", "add_arguments", "run"]

about = "tests, speed and training steps on a GPU, in one report"
_ROOT = Path(__file__).parents[2]
_PACKAGE = __package__ or "benchmarks.gpu"
_TAIL = 30
# A test for a GPU: the mark, or the test of a file's kernel cases, which has it.
_FOR_A_GPU = re.compile(r"pytest\.mark\.gpu|\btest_on_a_gpu\b")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One process, which is killed after ``limit`` seconds."""

    name: str
    command: list[str]
    limit: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this suite."""
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="an empty folder for all results"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda",
        help="cpu rehearses the programme with small inputs and the operators for CPUs",
    )  # fmt: skip


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
    return run_parts(parts(args.device, out), args.device, out)


def run_parts(todo: Sequence[Part], device: str, out: Path) -> int:
    """Run parts and write what each printed; 0 if all passed."""
    facts = ", ".join(f"{key} {value}" for key, value in machine(device).items())
    with (out / "report.md").open("w") as report:
        print("# GPU report", facts, sep="\n\n", file=report, flush=True)
        passed = True
        for part in todo:
            outcome, printed = _run(part, out)
            passed &= outcome == "passed"
            print(f"{part.name}: {outcome}", flush=True)
            print(f"\n## {part.name}: {outcome}\n\n{printed}", file=report, flush=True)
    print(f"wrote {out / 'report.md'}")
    return 0 if passed else 1


def _run(part: Part, out: Path) -> tuple[str, str]:
    """What became of a part, and what it printed; if it did not pass, the end of its log, too."""
    log = out / f"{part.name}.log"
    output = out / f"{part.name}.md"
    began = time.monotonic()
    with output.open("w") as printed, log.open("w") as progress:
        process = subprocess.Popen(
            part.command, stdout=printed, stderr=progress, cwd=_ROOT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"}, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(part.limit)
            outcome = "passed" if code == 0 else f"failed with exit status {code}"
        except subprocess.TimeoutExpired:
            outcome = f"stopped after {time.monotonic() - began:.0f} s"
        finally:  # also after an interrupt, which does not reach a session of its own
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    said = output.read_text(errors="replace").strip() or "Nothing was printed."
    if outcome != "passed":
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL:])
        said += f"\n\nThe end of its log:\n\n```text\n{tail}\n```"
    return outcome, said


def parts(device: str, out: Path) -> list[Part]:
    """The programme for a device; ``cpu`` is a rehearsal in which everything is small."""
    python, small = [sys.executable, "-m"], device == "cpu"
    kernels = [*python, _PACKAGE.rpartition(".")[0], "kernels", "--device", device]
    kernels += ["--json", str(out / "kernels.jsonl")]
    kernels += ["--quick", "--sizes", "12"] if small else ["--time-limit", "130"]
    if importlib.util.find_spec("matplotlib"):
        kernels += ["--plots", str(out)]
    training = [*python, f"{_PACKAGE}.training", "--device", device]
    return [
        Part(name="tests", command=_pytest(small), limit=200),
        Part(name="kernels", command=kernels, limit=170),
        Part(name="fsdp2", command=training, limit=80),
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
