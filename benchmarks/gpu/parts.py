"""The parts of the programme: processes with a time limit, and what is read from their output."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_PACKAGE = __package__.rpartition(".gpu")[0] if __package__ else "benchmarks"
_TAIL = 30


@dataclass(frozen=True, kw_only=True)
class Part:
    """One process of the programme.

    Attributes:
        limit: seconds after which it is killed.
        background: runs beside the others (it needs no GPU).
        read: further entries for the outcome, from the output.
        wrong: why an outcome with exit status 0 is no success; None if it is one.
    """

    name: str
    about: str
    command: list[str]
    limit: float
    background: bool = False
    read: Callable[[str], dict[str, Any]] = lambda output: {}
    wrong: Callable[[dict[str, Any]], str | None] = lambda outcome: None


class Running:
    """A part's process; its output goes to a file at once."""

    def __init__(self, part: Part, out: Path) -> None:
        self.part, self.log = part, out / f"{part.name}.log"
        self._started = time.monotonic()
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                part.command, stdout=log, stderr=subprocess.STDOUT, cwd=_ROOT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"}, start_new_session=True,
            )  # fmt: skip
        # Noted when it happens: a part in the background is only looked at in the end.
        self._ended: float | None = None
        threading.Thread(target=self._note_end, daemon=True).start()

    def _note_end(self) -> None:
        self._process.wait()
        self._ended = time.monotonic()

    def finish(self, deadline: float) -> dict[str, Any]:
        """Wait, until the part's limit or the deadline at the latest; the outcome."""
        limit = min(self._started + self.part.limit, deadline) - time.monotonic()
        try:
            code: int | None = self._process.wait(max(0.0, limit))
        except subprocess.TimeoutExpired:
            self.kill()
            code = None
        output = self.log.read_text(errors="replace")
        outcome: dict[str, Any] = {"part": self.part.name, "exit": code} | self.part.read(output)
        if code is None:
            outcome["status"] = f"stopped after {time.monotonic() - self._started:.0f} s"
        elif code != 0:
            outcome["status"] = f"failed with exit status {code}"
        else:
            outcome["status"] = self.part.wrong(outcome) or "passed"
        if outcome["status"] != "passed":
            outcome["tail"] = "\n".join(output.splitlines()[-_TAIL:])
        ended = self._ended or time.monotonic()
        return outcome | {"seconds": round(ended - self._started, 1)}

    def kill(self) -> None:
        """End the process and those that it started, if it still runs."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def parts(device: str, out: Path) -> list[Part]:
    """The programme for a device; ``cpu`` is a rehearsal in which everything is small."""
    python, small = [sys.executable, "-m"], device == "cpu"
    compile_ = [*python, f"{_PACKAGE}.gpu.compile", "--json", str(out / "compile.jsonl")]
    kernels = [*python, _PACKAGE, "kernels", "--device", device]
    kernels += ["--json", str(out / "kernels.jsonl")]
    if importlib.util.find_spec("matplotlib"):
        kernels += ["--plots", str(out)]
    training = [*python, f"{_PACKAGE}.gpu.training", "--device", device]
    training += ["--json", str(out / "fsdp2.jsonl")]
    # A rehearsal measures nothing, so its parts may as well run all at once.
    return [
        Part(
            name="tests",
            about="`pytest -m gpu`",
            command=_pytest(small),
            limit=200,
            background=small,
            read=outcomes_of_pytest,
            wrong=lambda outcome: None if outcome["passed"] else "no test passed",
        ),
        Part(
            name="compile",
            about="what the kernels compile to",
            command=[*compile_, "--rehearse"] if small else compile_,
            limit=240,
            background=True,
        ),
        Part(
            name="kernels",
            about="the kernel benchmark",
            command=kernels
            + (["--quick", "--sizes", "12"] if small else ["--time-limit", "130"]),
            limit=170,
            background=small,
        ),
        Part(
            name="fsdp2",
            about="training steps on two ranks that share the device, through gloo",
            command=training + (["--rehearse"] if small else []),
            limit=80,
            background=small,
        ),
    ]  # fmt: skip


def _pytest(small: bool) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-vv", "--continue-on-collection-errors"]
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


# The mark, or the test of a file's kernel cases, which has it.
_FOR_A_GPU = re.compile(r"pytest\.mark\.gpu|\btest_on_a_gpu\b")
_OUTCOME = re.compile(
    r"^(?:\[gw\d+\] \[ *\d+%\] (?P<said>[A-Z]+) (?P<test>.+?)"
    r"|(?P<test_>\S+::.+?) (?P<said_>PASSED|FAILED|SKIPPED|ERROR).*)\s*$",
    re.MULTILINE,
)


def outcomes_of_pytest(output: str) -> dict[str, Any]:
    """Tests by outcome, from what ``pytest -vv`` printed so far, with and without xdist."""
    found: dict[str, list[str]] = {"PASSED": [], "FAILED": [], "SKIPPED": [], "ERROR": []}
    for match in _OUTCOME.finditer(output):
        said = match["said"] or match["said_"]
        found.setdefault(said, []).append(match["test"] or match["test_"])
    return {
        "passed": len(found["PASSED"]),
        "failed": found["FAILED"] + found["ERROR"],
        "skipped": found["SKIPPED"],
    }
