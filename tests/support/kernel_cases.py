"""Cases for Triton kernels: run interpreted in a process of their own, compiled and emulated, or
natively on a GPU.

A case is a function that takes a device. Triton decides at import whether it interprets, so
interpreted cases run as ``python <test file> <results>`` and report to a file. Compiled ones run in
the tests' own process, inside ``device.ptx.launch.emulated``.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from device.interpreted import ORDERS, Watched
from support import interpreter
from support.paths import ROOT


class Cases(dict[str, Callable[[str], None]]):
    """Named functions that take a device."""

    def __call__(self, name: str):
        """Decorator that adds a case."""

        def register(function: Callable[[str], None]) -> Callable[[str], None]:
            assert name not in self
            self[name] = function
            return function

        return register

    def tests(
        self, file: str, *few: str, more: tuple[str, ...] = (), interpreted: list[str]
    ) -> tuple[Any, Any, Any, Any]:
        """Make a test file's tests: the fixture ``outcome``, ``test_interpreted``,
        ``test_compiled`` and ``test_on_a_gpu``. The file must assign them to these names.

        Args:
            file: ``__file__``.
            few: cases that `make test` emulates for sm_90, and `make test-device` for sm_80, too.
            more: others that `make test-device` emulates for sm_80.
            interpreted: those that `make test` interprets.
        """
        assert {*few, *more} <= {*self}, {*few, *more} - {*self}
        device, name = pytest.mark.device, Path(file).stem
        some = [pytest.param(n, marks=[] if n in interpreted else [device]) for n in self]
        emulated = [pytest.param(n, 90, marks=[] if n in few else [device]) for n in self]
        emulated += [pytest.param(n, 80, marks=[device]) for n in (*few, *more)]

        @pytest.fixture(scope="session")
        def outcome(request: Any, tmp_path_factory: Any) -> dict[str, dict[str, Any]]:
            return _interpreted(file, request, tmp_path_factory.mktemp(name))

        # All of them run in another process, which one of the workers starts.
        @pytest.mark.xdist_group(f"interpreted {name}")
        @pytest.mark.timeout(600)
        @pytest.mark.parametrize("name", some)
        def test_interpreted(outcome: Any, record_property: Any, name: str) -> None:
            record_property("interpreted", outcome[name]["launches"])
            assert not outcome[name]["failure"], outcome[name]["failure"]

        @pytest.mark.timeout(600)
        @pytest.mark.parametrize(("name", "arch"), emulated)
        def test_compiled(emulation: Any, name: str, arch: int) -> None:
            with emulation(arch):
                self[name]("cpu")

        @pytest.mark.gpu
        @pytest.mark.parametrize("name", self)
        def test_on_a_gpu(name: str) -> None:
            self[name]("cuda")

        return outcome, test_interpreted, test_compiled, test_on_a_gpu

    def main(self, results: Path) -> None:
        """Run the cases named in ``results``, interpreted, and write there ``{name: outcome}``.

        Programs run reversed, in random order and interleaved, in turn, never first to last.
        """
        interpreter.prepare()
        orders = {name: ORDERS[i % len(ORDERS)] for i, name in enumerate(self)}
        outcome: dict[str, dict[str, Any]] = {}
        for name in json.loads(results.read_text()):
            start = time.process_time()
            watched, failure = Watched(orders[name]), None
            try:
                with watched.installed():
                    self[name]("cpu")
            except Exception:
                failure = f"programs {orders[name]}: {traceback.format_exc()}"
            launches = [watched.launches, watched.several]
            outcome[name] = {"failure": failure, "launches": launches}
            print(f"{time.process_time() - start:6.1f} s  {name}", flush=True)
            results.write_text(json.dumps(outcome))


def _interpreted(file: str, request: Any, directory: Path) -> dict[str, dict[str, Any]]:
    """Run a test file's requested cases in Triton's interpreter. By name, return a traceback or
    None as ``failure``, and ``launches``: all, and those of several programs."""
    results = directory / "results.json"
    asked = [
        i for i in request.session.items if i.path == Path(file) and "outcome" in i.fixturenames
    ]
    results.write_text(json.dumps([item.callspec.params["name"] for item in asked]))
    # A test file run as a script finds `support` there.
    path = os.pathsep.join([str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-W", "ignore::RuntimeWarning", file, str(results)],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(results.read_text())


def kernels(name: str) -> Any:
    """A module of the kernels' package."""
    return importlib.import_module(f"tagc.triton_kernels.{name}")
