"""The tests for a GPU, without one: package ``ttsem`` runs what Triton's frontend makes of kernels.

    PYTHONPATH=tests python -m device.frontend tests/triton -m gpu

Every launch's TTIR is executed on CPU tensors. A launch fails at the kernel's line if it reads or
writes outside of its tensors, computes something undefined, or if two of its programs race. It
takes an environment of its own, which ``make test-device`` makes: Python 3.12, torch 2.14, Triton
3.8.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch


@dataclass(frozen=True, kw_only=True)
class Exempt:
    """Volatile reads of one kernel that may meet atomic updates, and nothing else may.

    Attributes:
        kernel: its name.
        line: what the kernel's line must contain.
        reason: why no order of the two does harm.
    """

    kernel: str
    line: str
    reason: str


EXEMPT = (
    Exempt(
        kernel="peel_kernel",
        line="volatile=True",
        reason="value and degree are one 64-bit word, read and updated whole, and a degree of 1 "
        "stays true until the thread that owns the cell's last key takes it out",
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
        self._kernel, self._ir = "", ""

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """In place of ``ttsem``'s own."""
        harness: Any = importlib.import_module("ttsem.harness")
        pidraces: Any = importlib.import_module("ttsem.pidraces")
        execute, find = harness.execute, pidraces.find_race

        def noting(record: Any, ir: str, *args: Any, **kwargs: Any) -> Any:
            self.launches += 1
            self._kernel, self._ir = record.fn_name, ir
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
        sanitize: Any = importlib.import_module("ttsem.sanitize")
        return any(
            e.kernel == self._kernel and e.line in sanitize._source_of(op, self._ir)[2]
            for e in EXEMPT
        )


class Summary:
    """A plugin of pytest that counts at the end."""

    def __init__(self, races: Races, state: Any) -> None:
        self._races, self._state = races, state

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the counts."""
        r = self._races
        terminalreporter.write_line(
            f"frontend: {r.launches} launches, {r.checked} of several programs checked for races, "
            f"{self._state.races_unchecked} too large for that"
        )
        for kernel, count in r.exempted.items():
            terminalreporter.write_line(f"frontend: {kernel}: exempt reads in {count} launches")


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


def main(arguments: list[str]) -> int:
    """Run pytest; its exit status."""
    sanitize: Any = importlib.import_module("ttsem.sanitize")
    races = Races()
    with sanitize.session() as state, stand_ins(), races.installed():
        # Python 3.12 and torch 2.14 warn of what the project's own versions do not.
        options = ["-o", "filterwarnings=ignore", "-p", "no:cacheprovider"]
        return int(pytest.main([*options, *arguments], plugins=[Summary(races, state)]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
