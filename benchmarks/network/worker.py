"""One rank of a run: it trains all methods, on one link after the other, and measures.

It lives through all cells of a run, since starting it costs seconds. All ranks know the same cells,
so they choose the same next one; the first one writes them.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from examples.text import load_corpus
from tagc.costs.auto import measure_link
from tagc.plan.sites import exchange_bytes

from ..records import Record, Results, machine
from . import ledger
from .launch import UNLIMITED, bits_per_second, label, limit, sent_bytes
from .methods import ALONE, Method, cell_key, keys
from .training import Trainer

# After a change of rate, TCP and tc need a step to forget the old one.
_WARM_UP = 1
_LEAST_STEPS = 3
# The timed steps of a cell should take no longer than this.
_CELL_SECONDS = 15.0
# In which each site exchanges once, and as often trains without.
_PERIODS = 4
_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")


def measure(args: argparse.Namespace) -> None:
    """As one of the ranks, measure every cell that the file does not have."""
    ledger.install()
    _Rank(args).measure()


class _Rank:
    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._ranks = dist.get_world_size()
        self._results = Results(args.json, "key", {"suite": "network"})
        self._mesh = init_device_mesh("cpu", (self._ranks,))
        self._corpus = load_corpus()
        self._trainers: dict[str, Trainer] = {}
        self._rate = UNLIMITED
        self._facts = machine() | {
            "cores": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
            "command": args.command,
            "congestion_control": _CONGESTION.read_text().strip(),
        }
        dist.barrier()  # all have read the file before anyone writes

    def measure(self) -> None:
        missing = [(k, m) for k, m in keys(self._args, self._ranks) if not self._results.get(k)]
        # Before the first limit: it is not measured, so it need not wait for a slow link.
        for method in dict.fromkeys(m for _, m in missing if m is not None):
            self._settle(method)
        for key, method in missing:
            rate = key["rate"]
            self._limit(rate)
            if method is None:
                numbers = self._link()
            elif method.apart:
                numbers = self._sites(method)
            else:
                numbers = self._steps(rate, method)
            if method is not None:
                numbers["about"] = method.about
            first, name = dist.get_rank() == 0, "messages" if method is None else method.name
            load = {"load": os.getloadavg()[0]}
            self._results.add(key, self._facts | load | numbers, write=first)
            if first:
                print(self._ranks, "ranks", label(rate), name, file=sys.stderr, flush=True)

    def _limit(self, rate: str) -> None:
        dist.barrier()
        if rate != self._rate and os.environ["LOCAL_RANK"] == "0":
            limit(rate)
        self._rate = rate
        dist.barrier()

    def _of_all(self, mine: Record) -> list[Record]:
        answers: list[Any] = [None] * self._ranks
        dist.all_gather_object(answers, mine)
        return answers

    def _link(self) -> Record:
        """What policy `auto` measures: the latency (seconds) of an exchange by messages, and the
        rates (bits per second, payload only) of large exchanges and of gloo's own all-gathers. Of
        all ranks' numbers the worst."""
        link = measure_link(self._mesh.get_group(), torch.device("cpu"))
        rate = 8 * link.bandwidth
        mine = {"latency": link.latency, "exchange": rate, "all_gather": rate / link.all_gather}
        answers = self._of_all(mine)
        return {
            "exchange_latency": max(a["latency"] for a in answers),
            "exchange_rate": min(a["exchange"] for a in answers),
            "all_gather_rate": min(a["all_gather"] for a in answers),
        }

    def _settle(self, method: Method) -> None:
        """Train until the steps are those of the long run."""
        trainer = self._trainer(method)
        while trainer.steps < trainer.settle_steps:
            trainer.step()
        dist.barrier()

    def _steps(self, rate: str, method: Method) -> Record:
        """Timed steps, and what they send: of a step's seconds the slowest rank's, of the rest the
        mean. The kernel's bytes, and tagc's beside them, are those of a whole host."""
        if method.measures_link:
            # It is made on the link, and settles without waiting for it.
            self._trainers.pop(method.name, None)
            self._trainer(method)
            self._limit(UNLIMITED)
            self._settle(method)
            self._limit(rate)
        trainer = self._trainer(method)
        for _ in range(_WARM_UP):
            trainer.step()
        most = int(_CELL_SECONDS / self._expected_seconds(rate, method))
        count = max(_LEAST_STEPS, min(self._args.steps, most))
        counted, sent = trainer.tagc_bytes, _sent()
        tally = ledger.tally(reset=True)
        took = [trainer.step() for _ in range(count)]
        # All of this rank's bytes have left once the others have what they waited for.
        kernel = (_sent() - sent) / count
        ours = {
            name: trainer.ranks_per_host * (after - counted[name]) / count
            for name, after in trainer.tagc_bytes.items()
        }
        answers = self._of_all({"took": took, "kernel": kernel, "tagc": ours})
        turns = [*zip(*(a["took"] for a in answers), strict=True)]
        mean_ours = {k: statistics.fmean(a["tagc"][k] for a in answers) for k in ours}
        computed = [statistics.fmean(seconds - waited for seconds, waited in t) for t in turns]
        return {
            "step_seconds": [max(seconds for seconds, _ in turn) for turn in turns],
            "communication_seconds": [statistics.fmean(w for _, w in turn) for turn in turns],
            "compute_seconds": statistics.median(computed),
            "kernel_bytes": statistics.fmean(a["kernel"] for a in answers),
            "tagc_bytes": mean_ours or None,
            "payload_bytes": {k: v / count for k, v in tally.payload.items()},
            "collectives": {k: v / count for k, v in tally.counts.items()},
        }

    def _expected_seconds(self, rate: str, method: Method) -> float:
        key = cell_key(self._args, self._ranks, UNLIMITED, method)
        if (unlimited := self._results.get(key)) is None:
            return 1.0
        seconds = statistics.median(unlimited["step_seconds"])
        return seconds + 8 * unlimited["kernel_bytes"] / bits_per_second(rate)

    def _sites(self, method: Method) -> Record:
        """Steps as a site, in turns with as many without any exchange. A period is from the middle
        between two exchanges to the middle between the next two. Of its seconds (with the exchange,
        and without) the slowest rank's, of the rest the mean."""
        self._settle(ALONE)
        sites, alone = self._trainer(method), self._trainer(ALONE)
        every, handle = sites.every, sites.sites
        took, before, kernel = [], handle.metrics(), 0
        for _ in range(_PERIODS):
            without = self._together(alone, every)
            sent = _sent()
            took.append((self._together(sites, every), without))
            kernel += _sent() - sent
        after, plan, steps = handle.metrics(), handle.plan(), _PERIODS * every
        mine = {
            "kernel_bytes": kernel / steps,
            "plan_bytes": exchange_bytes(plan.units) / every,
            "sent_bytes": (after.wire_bytes - before.wire_bytes) / steps,
            "waited_seconds": (after.wait_seconds - before.wait_seconds) / steps,
            "waited_exchanges": after.waited - before.waited,
            "exchanges": after.exchanges - before.exchanges,
        }
        answers = self._of_all({"took": took, **mine})
        periods = zip(*(a["took"] for a in answers), strict=True)
        return {name: statistics.fmean(a[name] for a in answers) for name in mine} | {
            "every": every,
            "period_seconds": [[max(t) for t in zip(*ranks, strict=True)] for ranks in periods],
        }

    def _together(self, trainer: Trainer, steps: int) -> float:
        """Seconds of this rank's steps, begun when all ranks have come here."""
        dist.barrier()
        if (elsewhere := self._args.step_time) is None:
            return sum(trainer.step()[0] for _ in range(steps))
        return sum(trainer.step_elsewhere(elsewhere) for _ in range(steps))

    def _trainer(self, method: Method) -> Trainer:
        if method.name not in self._trainers:
            trainer = Trainer(method, self._args.settings, self._mesh, self._corpus)
            self._trainers[method.name] = trainer
        return self._trainers[method.name]


def _sent() -> int:
    """Bytes that the kernel counted on this host's interface, all ranks being at this point."""
    dist.barrier()
    return sent_bytes()
