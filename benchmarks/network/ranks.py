"""The processes of a run, one in each namespace, as seen from outside: ask all, get all answers."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .namespaces import INTERFACE, Network, address

if TYPE_CHECKING:
    from .training import Settings

_ROOT = Path(__file__).parents[2]
# A namespace has all ports to itself.
_PORT = 29500
_GRACE = 5.0


def environment(network: Network, rank: int) -> dict[str, str]:
    """The variables of a rank's process, as torchrun would set them."""
    threads = max(1, len(os.sched_getaffinity(0)) // network.ranks)
    return os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % network.ranks_per_host),
        "WORLD_SIZE": str(network.ranks),
        "LOCAL_WORLD_SIZE": str(network.ranks_per_host),
        "MASTER_ADDR": address(0),
        "MASTER_PORT": str(_PORT),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": str(threads),
    }


class RanksError(RuntimeError):
    """A rank failed, died or did not answer in time; the message has what it wrote."""


class Ranks:
    """A worker per namespace, from ``__enter__`` until ``__exit__``.

    Args:
        timeout: seconds after which a collective fails, and twice that an answer is given up.
    """

    def __init__(self, network: Network, settings: Settings, timeout: float = 900) -> None:
        self._network, self._settings, self._timeout = network, settings, timeout
        self._processes: list[subprocess.Popen[str]] = []
        self._logs = tempfile.TemporaryDirectory(prefix="tagc-network-")

    def __enter__(self) -> Ranks:
        try:
            for rank in range(self._network.ranks):
                self._processes.append(self._start(rank))
            self._send({"settings": asdict(self._settings), "timeout": self._timeout})
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(graceful=error is None)

    def ask(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        """Every rank's answer to a command of :class:`benchmarks.network.worker.Worker`.

        Raises:
            RanksError: if any rank fails; the others may hang then, so leave the context.
        """
        self._send({"do": do, **arguments})
        deadline = time.monotonic() + 2 * self._timeout
        answers = {}
        waiting = {p.stdout.fileno(): rank for rank, p in enumerate(self._processes) if p.stdout}
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], max(0, deadline - time.monotonic()))
            if not ready:
                late = ", ".join(str(rank) for rank in waiting.values())
                raise RanksError(f"no answer to {do!r} from rank {late}\n{self._all_logs()}")
            for descriptor in ready:
                rank = waiting.pop(descriptor)
                answers[rank] = self._read(rank)
        return [answers[rank] for rank in sorted(answers)]

    def close(self, *, graceful: bool = False) -> None:
        """End all workers: by closing their input, or now."""
        for process in self._processes:
            if process.stdin:
                # It may have died with something unsent.
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
        for process in self._processes:
            try:
                process.wait(_GRACE if graceful else 0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout:
                process.stdout.close()
        self._processes.clear()
        self._logs.cleanup()

    def _start(self, rank: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "benchmarks.network.worker"]
        with self._log(rank).open("w") as log:
            return subprocess.Popen(
                self._network.command(rank, command),
                cwd=_ROOT,
                env=environment(self._network, rank),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                # Ctrl-C is for this process, which then ends its ranks.
                start_new_session=True,
            )

    def _send(self, content: dict[str, Any]) -> None:
        for rank, process in enumerate(self._processes):
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(content) + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                raise RanksError(f"rank {rank} is gone\n{self._all_logs()}") from None

    def _read(self, rank: int) -> dict[str, Any]:
        process = self._processes[rank]
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            code = process.wait()
            raise RanksError(f"rank {rank} died with exit code {code}\n{self._all_logs()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RanksError(f"rank {rank} failed:\n{answer['error']}")
        return answer

    def _all_logs(self) -> str:
        ranks = range(len(self._processes))
        return "\n".join(f"rank {rank} wrote:\n{self._log(rank).read_text()}" for rank in ranks)

    def _log(self, rank: int) -> Path:
        return Path(self._logs.name) / f"rank{rank}.log"
