"""Sites under torchft that are killed and stopped at random: the others go on, nothing is lost."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from support import elastic_train

pytestmark = [pytest.mark.recipes, pytest.mark.timeout(2400)]


class Sites:
    """Processes, each a site, and the lighthouse that knows them."""

    def __init__(self, folder: Path, policy: str) -> None:
        self.folder, self.policy = folder, policy
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.start_lighthouse()
        self.started = 0
        self.running: dict[int, subprocess.Popen] = {}

    def start_lighthouse(self) -> None:
        """A process of its own, which can be killed."""
        program = (
            "import time, torchft.coordination as c; server = c.LighthouseServer("
            f"bind='127.0.0.1:{self.port}', min_replicas=2, join_timeout_ms=3000, "
            "heartbeat_timeout_ms=1500); time.sleep(1e6)"
        )
        self.lighthouse = subprocess.Popen([sys.executable, "-c", program])

    def stop_lighthouse(self) -> None:
        self.lighthouse.kill()
        self.lighthouse.wait()

    def start(self) -> None:
        environment = os.environ | {
            "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{self.port}",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        name = self.started = self.started + 1
        with (self.folder / f"{name}.err").open("w") as err:
            log, script = self.folder / f"{name}.log", elastic_train.__file__
            self.running[name] = subprocess.Popen(
                [sys.executable, script, log, str(10**9), self.policy],
                env=environment, stdout=subprocess.DEVNULL, stderr=err,
            )  # fmt: skip

    def signal(self, name: int, what: signal.Signals) -> None:
        self.running[name].send_signal(what)

    def kill(self, name: int) -> None:
        process = self.running.pop(name)
        process.kill()
        process.wait()

    def stop(self) -> None:
        for name in list(self.running):
            self.kill(name)
        self.stop_lighthouse()

    def check_alive(self) -> None:
        for name, process in self.running.items():
            assert process.poll() is None, (self.folder / f"{name}.err").read_text()[-4000:]

    def go_on(self, exchanges: int) -> None:
        """Wait until so many more are counted."""
        began, after = time.monotonic(), self.count + exchanges
        while self.count < after:
            assert time.monotonic() - began < 120, "no site goes on"
            self.check_alive()
            time.sleep(0.2)

    def lines(self) -> dict[int, list[dict[str, Any]]]:
        """What every site has written."""
        found = {}
        for log in self.folder.glob("*.log"):
            lines = log.read_text().splitlines(keepends=True)
            found[int(log.stem)] = [json.loads(line) for line in lines if line.endswith("\n")]
        return found

    @property
    def count(self) -> int:
        return max((lines[-1]["count"] for lines in self.lines().values() if lines), default=0)


def check(sites: Sites) -> int:
    """All sites that count an exchange have the same anchors, and lost nothing in it.

    Returns:
        How many exchanges were compared.
    """
    by_name: dict[int, list[dict[str, Any]]] = {}
    for lines in sites.lines().values():
        for before, line in itertools.pairwise(lines):
            if line["healed"] == before["healed"]:
                assert line["owed_before"] == before["owed_after"]
        for line in lines:
            by_name.setdefault(line["name"], []).append(line)
        # Of two sites that are left, one may have to be started first.
        assert all(line["seconds"] < 120 for line in lines)
    compared = 0
    for found in by_name.values():
        for line in found:
            assert line["count"] == found[0]["count"]
            assert (line["steps"], line["marks"]) == (found[0]["steps"], found[0]["marks"])
        if len(found) < found[0]["sites"]:
            continue  # one was killed before it wrote its line
        compared += len(found) > 1
        came_in = sum(line["came_in"] + line["owed_before"] - line["owed_after"] for line in found)
        handed_out = found[0]["average"] * sum(line["active"] for line in found)
        assert abs(came_in - handed_out) < 1e-4, f"{came_in - handed_out} is lost"
    return compared


@pytest.mark.parametrize("policy", ["waiting", "delayed"])
def test_random_faults(tmp_path: Path, policy: str) -> None:
    draw, faults = random.Random(0), 100
    sites = Sites(tmp_path, policy)
    stopped: dict[int, float] = {}
    try:
        for _ in range(3):
            sites.start()
        before, moved, last = 0, time.monotonic(), 2
        while faults:
            time.sleep(draw.choice((0.05, 0.5, 2)))
            for name, until in list(stopped.items()):
                if time.monotonic() > until:
                    del stopped[name]
                    sites.signal(name, signal.SIGCONT)
            sites.check_alive()
            if (now := sites.count) > before:
                before, moved = now, time.monotonic()
            assert time.monotonic() - moved < 120, "no site goes on"
            living = [name for name in sites.running if name not in stopped]
            if len(sites.running) < 3:
                sites.start()
            elif len(living) > 1 and now > last:
                faults, last = faults - 1, now + 1
                name = draw.choice(living)
                if draw.random() < 0.5:
                    sites.kill(name)
                else:  # shorter or longer than the timeout
                    sites.signal(name, signal.SIGSTOP)
                    stopped[name] = time.monotonic() + draw.choice((0.3, 3, 8))
        for name in stopped:
            sites.signal(name, signal.SIGCONT)
        sites.go_on(3)
    finally:
        sites.stop()
    assert check(sites) > 50


def test_a_lighthouse_that_restarts(tmp_path: Path) -> None:
    """All sites wait for it, and go on."""
    sites = Sites(tmp_path, "waiting")
    try:
        for _ in range(2):
            sites.start()
        for seconds in (0, 1, 10, None):
            sites.go_on(3)
            if seconds is not None:
                sites.stop_lighthouse()
                time.sleep(seconds)
                sites.start_lighthouse()
    finally:
        sites.stop()
    assert check(sites) > 9
