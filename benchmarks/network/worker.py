"""One rank: answers commands, a JSON line each, until its input closes.

It lives through all cells of a run, since starting it costs seconds. Commands come on stdin and
answers go to what was stdout; anything that a library prints goes to stderr.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import statistics
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

from . import ledger

# Before torch's users bind the collectives by name.
ledger.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

from examples.text import load_corpus  # noqa: E402
from tagc.plan.sites import exchange_bytes  # noqa: E402

from .baselines import all_gather, exchange  # noqa: E402
from .methods import ALONE, resolve  # noqa: E402
from .namespaces import INTERFACE  # noqa: E402
from .training import Settings, Trainer  # noqa: E402

_COUNTER = Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes")
_PR_SET_PDEATHSIG = 1
_LATENCY_REPEATS, _BANDWIDTH_REPEATS = 20, 30


class Worker:
    """The commands, by the names of the methods; keyword arguments in, JSON out."""

    def __init__(self, settings: Settings, timeout: float) -> None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._mesh = init_device_mesh("cpu", (self._ranks,))
        self._settings = settings
        self._corpus = load_corpus()
        self._trainers: dict[str, Trainer] = {}

    def ready(self) -> dict[str, Any]:
        """All ranks have met."""
        dist.barrier()
        congestion = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
        return {"threads": torch.get_num_threads(), "congestion_control": congestion}

    def link(self, payload: int) -> dict[str, Any]:
        """Latency of 4-byte collectives (seconds) and rate of one that sends ``payload`` bytes
        a rank (bits per second, payload only), on this rank: the median latency, and the rate over
        several, as gloo's collectives use both directions of a link at one time and not at another.

        ``exchange`` is what the link can do, by messages with the receives posted first.
        """
        large = max(1, payload // 4 // (self._ranks - 1))
        bits = 8 * 4 * large * (self._ranks - 1)
        measured = {}
        for name, collective in _PROBES.items():
            measured[f"{name}_latency"] = statistics.median(
                _seconds(collective, 1, _LATENCY_REPEATS)
            )
            measured[f"{name}_rate"] = bits / statistics.fmean(
                _seconds(collective, large, _BANDWIDTH_REPEATS)
            )
        return measured

    def settle(self, method: str) -> dict[str, Any]:
        """Train a method until its steps are those of the long run."""
        trainer = self._trainer(method)
        while trainer.steps < trainer.settle_steps:
            trainer.step()
        dist.barrier()
        return {"steps": trainer.steps, "parameters": trainer.parameters}

    def time(self, method: str, warm_up: int, steps: int) -> dict[str, Any]:
        """Time steps and count what they send, on this rank; seconds a step in order. The kernel's
        bytes, and tagc's beside them, are those of its whole host."""
        trainer = self._trainer(method)
        for _ in range(warm_up):
            trainer.step()
        counted, sent = trainer.tagc_bytes, _sent()
        tally = ledger.reset()
        took = [trainer.step() for _ in range(steps)]
        # All of this rank's bytes have left once the others have what they waited for.
        after = trainer.tagc_bytes
        return {
            "step_seconds": [seconds for seconds, _ in took],
            "communication_seconds": [waited for _, waited in took],
            "kernel_bytes": (_sent() - sent) / steps,
            "tagc_bytes": (
                None
                if counted is None or after is None
                else [
                    trainer.ranks_per_host * (b - a) / steps
                    for a, b in zip(counted, after, strict=True)
                ]
            ),
            "payload_bytes": {k: v / steps for k, v in tally.payload.items()},
            "collectives": {k: v / steps for k, v in tally.counts.items()},
            "parameters": trainer.parameters,
        }

    def beside(self, method: str, periods: int, step_time: float | None) -> dict[str, Any]:
        """Time this rank as a site, in turns with as many steps without any exchange. A period is
        from the middle between two exchanges to the middle between the next two. ``step_time``: see
        :meth:`Trainer.step_elsewhere`; None computes the steps here."""
        sites, alone = self._trainer(method), self._trainer(ALONE.name)
        while alone.steps < alone.settle_steps:
            alone.step()
        every, handle = sites.every, sites.sites
        took, before, kernel = [], handle.metrics(), 0
        for _ in range(periods):
            without = self._together(alone, every, step_time)
            sent = _sent()
            took.append([self._together(sites, every, step_time), without])
            kernel += _sent() - sent
        after, plan = handle.metrics(), handle.plan()
        steps = periods * every
        return {
            "period_seconds": took,
            "every": every,
            "kernel_bytes": kernel / steps,
            "plan_bytes": exchange_bytes(plan.units) / every,
            "sent_bytes": (after.wire_bytes - before.wire_bytes) / steps,
            "waited_seconds": (after.wait_seconds - before.wait_seconds) / steps,
            "waited_exchanges": after.waited - before.waited,
            "exchanges": after.exchanges - before.exchanges,
            "parameters": sites.parameters,
        }

    def _together(self, trainer: Trainer, steps: int, step_time: float | None) -> float:
        """Seconds of this rank's steps, begun when all ranks have come here."""
        dist.barrier()
        if step_time is None:
            return sum(trainer.step()[0] for _ in range(steps))
        return sum(trainer.step_elsewhere(step_time) for _ in range(steps))

    def begin(self, method: str) -> dict[str, Any]:
        """Make a method anew, on the link as it is now."""
        self._trainers.pop(method, None)
        self._trainer(method)
        return {}

    def _trainer(self, method: str) -> Trainer:
        if method not in self._trainers:
            found = ALONE if method == ALONE.name else resolve(method)
            made = Trainer(found, self._settings, self._mesh, self._corpus)
            self._trainers[method] = made
        return self._trainers[method]


def _sent() -> int:
    """Bytes that the kernel counted on this rank's interface, all ranks being at this point."""
    dist.barrier()
    return int(_COUNTER.read_text())


def _all_gather(out: torch.Tensor, sent: torch.Tensor) -> None:
    all_gather(out, sent[: sent.numel() // dist.get_world_size()])


def _exchange(out: torch.Tensor, sent: torch.Tensor) -> None:
    ranks = dist.get_world_size()
    exchange(out.view(ranks, -1).unbind(), sent.view(ranks, -1).unbind())


_PROBES = {"all_gather": _all_gather, "exchange": _exchange}


def _seconds(collective: Any, numel: int, repeats: int) -> list[float]:
    """Seconds of each call of a collective with ``numel`` fp32 elements for each rank."""
    sent, out = torch.zeros(2, numel * dist.get_world_size())
    seconds = []
    for _ in range(repeats + 1):
        dist.barrier()
        start = time.perf_counter()
        collective(out, sent)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def main() -> None:
    """Serve: the first line is the settings, each further one a command."""
    # A killed orchestrator must not leave ranks behind, even in the middle of a collective.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the orchestrator ends its ranks
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(content: dict[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    try:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        start = json.loads(sys.stdin.readline())
        worker = Worker(Settings(**start["settings"]), start["timeout"])
        for line in sys.stdin:
            command = json.loads(line)
            answer(getattr(worker, command.pop("do"))(**command))
    except Exception:
        answer({"error": traceback.format_exc()})
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
