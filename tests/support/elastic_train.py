"""Trains one site under torchft, with a line of its accounts for every exchange that it counts.

Usage: python elastic_train.py LOG STEPS POLICY, with TORCHFT_LIGHTHOUSE in the environment.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tagc

sys.path.insert(0, str(Path(__file__).parent.parent))

from support.site_net import FOUR_BITS, adam, policy, train
from support.small_net import net
from tagc.ops.fingerprint import fingerprint

TIMEOUT = 4
"""Seconds after which a site is given up."""
OUTER = {"rate": 0.7, "momentum": 0.5}
POLICIES = {
    "waiting": policy(FOUR_BITS, every=4, outer=OUTER),
    "delayed": policy(FOUR_BITS, every=8, fragments=2, delay=3, alpha=0.25, outer=OUTER),
}


def main() -> None:
    import torchft  # pyright: ignore

    log, steps = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=TIMEOUT)),
        state_dict=None,
        load_state_dict=None,
        min_replica_size=1,
        use_async_quorum=False,
        timeout=timedelta(seconds=TIMEOUT),
        quorum_timeout=timedelta(seconds=60),
        quorum_retries=60,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
    )
    model = net()
    optimizer = adam(model)
    sites = tagc.sites(model, optimizer, POLICIES[sys.argv[3]], sites=manager)
    exchange: Any = sites.exchange_state
    watch(exchange, manager, log)
    while exchange.steps < steps:
        train(model, optimizer, os.getpid(), range(exchange.steps, exchange.steps + 1))
        time.sleep(0.01)
    os._exit(0)  # threads of the manager may outlive it


def mark(anchor: Any) -> list[int]:
    """How often a unit was exchanged, and what of its anchor sites compare."""
    return [anchor.exchanges, *fingerprint(anchor.values).tolist()]


def watch(exchange: Any, manager: Any, log: Path) -> None:
    """Write a line after each exchange."""
    begin, compare, finish = exchange._begin, exchange._compare, exchange._finish
    sums: dict[str, Any] = {}

    def begun(delay: int = 0) -> Any:
        sums["came_in"], began = 0.0, time.monotonic()
        attempt = begin(delay)
        sums["seconds"] = time.monotonic() - began
        return attempt

    def compared(flight: Any) -> Any:
        check = compare(flight)

        def checked() -> None:
            check()
            sums["name"], sums["sites"] = flight.name, exchange.group.size()

        return checked

    for anchor in exchange.anchors:

        def noted(anchor: Any = anchor, take: Any = anchor.take_change, none: bool = False) -> None:
            take(none=none)
            sums["came_in"] += total(anchor.change)

        def applied(anchor: Any = anchor, apply: Any = anchor.apply, **options: Any) -> None:
            sums["average"] += total(anchor.change)
            apply(**options)

        anchor.take_change, anchor.apply = noted, applied

    def finished(attempt: Any) -> None:
        sums["average"], began, before = 0.0, time.monotonic(), sums["seconds"]
        finish(attempt)
        line = sums | {
            "count": manager.current_step(),
            "steps": exchange._after,
            "active": exchange._active,
            "marks": [n for a in exchange.anchors for n in mark(a)],
            "owed_before": owed(exchange._owed),
            "owed_after": owed([anchor.owed() for anchor in exchange.anchors]),
            "failed": exchange.counts.failed,
            "healed": exchange.counts.healed,
            "seconds": before + time.monotonic() - began,
        }
        with log.open("a") as file:
            file.write(json.dumps(line) + "\n")

    exchange._begin, exchange._compare, exchange._finish = begun, compared, finished


def owed(found: Any) -> float:
    return sum(total(residual) for unit in found for residual in unit.residuals.values())


def total(values: torch.Tensor) -> float:
    return values.double().sum().item()


if __name__ == "__main__":
    main()
