"""The tests for a GPU, without one: package ``ttsem`` runs what Triton's frontend makes of kernels.

    PYTHONPATH=tests python -m device.frontend tests/triton/test_triton_*.py

Every launch's TTIR is executed on CPU tensors. A launch fails at the kernel's line if it reads or
writes outside of its tensors, computes something undefined, or if two of its programs race. Files
run in processes of their own, two at a time. It takes an environment of its own, which ``make
test-device`` makes: Python 3.12, torch 2.14, Triton 3.8. Tests of CUDA graphs, of matrices of
millions of elements, one of 300,000 keys, and those of all sizes of all formats are left out.
"""

from __future__ import annotations

import contextlib
import importlib
import linecache
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch


@dataclass(frozen=True, kw_only=True)
class Exempt:
    """Volatile reads of one kernel that may meet atomic updates, and nothing else may.

    Attributes:
        kernel: its name.
        line: how the kernel's line begins.
        reason: why no order of the two does harm.
    """

    kernel: str
    line: str
    reason: str


EXEMPT = (
    Exempt(
        kernel="peel_kernel",
        line="seen = tl.load(entry + item",
        reason="an entry is one 64-bit word, read and updated whole; that one key is left in it "
        "stays true until that key is taken out, and of all who see it one wins the key's bit",
    ),
    Exempt(
        kernel="peel_kernel",
        line="symbol = tl.load(value + item",
        reason="read where the entry said that one key is left: what others took out of the cell "
        "they took before they counted it, and nobody changes it until that key is taken out",
    ),
)


class Races:
    """The check for races between programs, with what is exempt left out.

    Attributes:
        launches: all.
        checked: launches of more than one program whose accesses were compared.
        exempted: launches of which reads were left out, by kernel.
    """

    def __init__(self) -> None:
        self.launches = self.checked = 0
        self.exempted: dict[str, int] = {}
        self._kernel = ""

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """In place of ``ttsem``'s own."""
        harness: Any = importlib.import_module("ttsem.harness")
        pidraces: Any = importlib.import_module("ttsem.pidraces")
        execute, find = harness.execute, pidraces.find_race

        def noting(record: Any, ir: str, *args: Any, **kwargs: Any) -> Any:
            self.launches += 1
            self._kernel = record.fn_name
            return execute(record, ir, *args, **kwargs)

        def finding(log: Any) -> Any:
            if not log:
                return find(log)
            self.checked += 1
            exempt = [self._exempts(entry) for entry in log]
            if not any(exempt):
                return find(log)
            self.exempted[self._kernel] = self.exempted.get(self._kernel, 0) + 1
            # Against everything but atomics they count, and everything else counts as ever.
            without_reads = [e for e, is_exempt in zip(log, exempt, strict=True) if not is_exempt]
            return find([e for e in log if e[1] != "a"]) or find(without_reads)

        with (
            mock.patch.object(harness, "execute", noting),
            mock.patch.object(pidraces, "find_race", finding),
        ):
            yield

    def _exempts(self, entry: Any) -> bool:
        _, kind, op, *_ = entry
        if kind != "r" or "isVolatile = true" not in op:
            return False
        return any(e.kernel == self._kernel and line_of(op).startswith(e.line) for e in EXEMPT)


def line_of(op: str) -> str:
    """The kernel's line that an operation was made of; of device functions the innermost."""
    found = re.search(r'"([^"]+\.py)":(\d+):\d+', op)
    return linecache.getline(found[1], int(found[2])).strip() if found else ""


class Stream:
    """The current stream."""

    cuda_stream = 0


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """What tests ask a GPU for, besides running kernels."""
    cuda = torch.cuda
    with contextlib.ExitStack() as stack:
        for name, answer in {
            "current_stream": lambda device=None: Stream(),
            "is_current_stream_capturing": lambda: False,
            "mem_get_info": lambda device=None: (0, 0),  # so that gigantic tests are skipped
            "synchronize": lambda device=None: None,
            "set_sync_debug_mode": lambda mode: None,
            "get_sync_debug_mode": lambda: 0,
        }.items():
            stack.enter_context(mock.patch.object(cuda, name, answer))
        yield


def run_one(file: str) -> int:
    """Run the tests of a file in this process, and print what was counted; pytest's status."""
    sanitize: Any = importlib.import_module("ttsem.sanitize")
    races = Races()
    # Python 3.12 and torch 2.14 warn of what the project's own versions do not.
    options = ["-o", "filterwarnings=ignore", "-o", "timeout=1200", "-p", "no:cacheprovider"]
    chosen = ["-m", "gpu or frontend", "-k", _CHOSEN, file]
    with sanitize.session() as state, stand_ins(), races.installed():
        status = int(pytest.main([*options, *chosen]))
    print(_COUNTED, races.launches, races.checked, state.races_unchecked)
    for kernel, count in races.exempted.items():
        print(f"{kernel}: volatile reads beside atomic updates are exempt in {count} launches")
    return status


# One test peels 300,000 keys, and matrices of a model's sizes take minutes each: of these, the one
# with few rows, which are long, runs.
_CHOSEN = (
    "not cuda_graph and not before_the_last_launch and not (large_matrices and not 3-16384) "
    "and not all_sizes and not several_tiles"
)
# The mark, or the test of a file's kernel cases, which has it.
_FOR_A_GPU = re.compile(r"pytest\.mark\.gpu|\btest_on_a_gpu\b")
_COUNTED = "launches, checked for races, too large for that:"


def main(files: list[str]) -> int:
    """Run the tests of all files; 0 if none failed."""
    failed, tests, counts = 0, 0, [0, 0, 0]
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(_start, file) for file in files]
        for run, file in zip(runs, files, strict=True):
            done = run.result()
            if done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:
                if _FOR_A_GPU.search(Path(file).read_text()):  # they should be here
                    print(f"--- {file}: has tests for a GPU, of which none was collected")
                    failed += 1
                continue
            print(f"--- {file}\n{done.stdout}{done.stderr}", flush=True)
            failed += done.returncode != 0
            tests += sum(int(n) for n in re.findall(r"^(?:.* )?(\d+) passed", done.stdout, re.M))
            found = re.search(rf"{_COUNTED} (\d+) (\d+) (\d+)", done.stdout)
            if found:
                counts = [a + int(b) for a, b in zip(counts, found.groups(), strict=True)]
    print(
        f"kernels by ttsem: {tests} tests passed, {counts[0]} launches, {counts[1]} of several "
        f"programs checked for races, {counts[2]} too large for that; {failed} files with a fault"
    )
    if not tests:
        print("nothing was run")
    return int(failed > 0 or not tests)


def _start(file: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "device.frontend", "--one", file]
    # A kernel from Triton's usual cache may name the files of another checkout, perhaps deleted;
    # then its lines cannot be read, and what is exempt is not found.
    with tempfile.TemporaryDirectory() as cache:
        env = os.environ | {"TRITON_CACHE_DIR": cache}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


if __name__ == "__main__":
    sys.exit(run_one(sys.argv[2]) if sys.argv[1] == "--one" else main(sys.argv[1:]))
