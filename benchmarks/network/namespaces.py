"""A rate-limited network on one machine: a network namespace per host, all on one switch.

The switch is a bridge in a namespace of its own, so neither an address nor an interface of it
exists outside: nothing can reach the machine, and nothing of it is changed. If links have latency,
the switch is a process (``latency.py``). A host has one rank, or several, which reach each other
over its loopback, without a limit. It has one interface, ``e0``; what it sends is shaped there by a
token bucket (``tc``, tbf). What it receives is not shaped; in symmetric collectives that is the sum
of what the others may send.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

INTERFACE = "e0"
_ROOT = Path(__file__).parents[2]
_PREFIX = "tagcnet"
_NAME = re.compile(rf"^{_PREFIX}-(\d+)-\w+$")
_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
# Queueing that a packet may meet in the bucket; more than TCP keeps there, so that none is lost.
_LATENCY = "50ms"
_LEAST_BURST = 68 * 1024
# The usual default, then the one that every namespace may use: with the host's own choice (bbr
# probes the link every few seconds) results would depend on it.
_CONGESTION_CONTROL = ("cubic", "reno")


class NetworkUnavailable(RuntimeError):  # noqa: N818 - it is a state of the machine
    """This machine, or this user, cannot make a network of namespaces; the message says why."""


@dataclass(frozen=True)
class Rate:
    """What one host may send, in bits per second; None is as fast as the machine goes."""

    bits_per_second: int | None

    @staticmethod
    def parse(text: str) -> Rate:
        """``unlimited``, or a number and a unit: ``10gbit``, ``200mbit``, ``64kbit``.

        Raises:
            ValueError: for anything else.
        """
        if text == "unlimited":
            return Rate(None)
        found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text)
        if not found or float(found[1]) == 0:
            raise ValueError(f"{text!r} is no rate: write unlimited, 10gbit, 200mbit or 64kbit")
        return Rate(round(float(found[1]) * _UNITS[found[2]]))

    @property
    def burst(self) -> int:
        """Bytes that go at once after a pause, 0 without a limit: a millisecond of tokens (with
        fewer, timers and not the rate limit a fast link), and no less than a large packet."""
        return max(_LEAST_BURST, self.bits_per_second // 8000) if self.bits_per_second else 0

    def __str__(self) -> str:
        if self.bits_per_second is None:
            return "unlimited"
        for unit, size in reversed(_UNITS.items()):
            if self.bits_per_second >= size:
                return f"{self.bits_per_second / size:g}{unit}"
        return f"{self.bits_per_second / 1000:g}kbit"

    @property
    def label(self) -> str:
        """For people: ``10 Gbit/s``."""
        found = re.fullmatch(r"([\d.]+)(.)bit", str(self))
        return str(self) if not found else f"{found[1]} {found[2].upper()}bit/s"


def check_requirements() -> None:
    """Raise :class:`NetworkUnavailable` unless this process can make namespaces."""
    if os.geteuid() != 0:
        raise NetworkUnavailable(
            "network namespaces need root: run it with sudo, or as root in a container with "
            "CAP_NET_ADMIN and CAP_SYS_ADMIN"
        )
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise NetworkUnavailable(
            f"{' and '.join(missing)} not found: install iproute2, which has ip and tc"
        )


def creation_commands(tag: str, hosts: int, *, bridge: bool = True) -> list[list[str]]:
    """The commands that make the switch and the hosts' namespaces, links and addresses.

    Args:
        bridge: whether the switch is a bridge; if not, its ports are left unconnected.
    """
    switch = _switch(tag)
    commands = [["ip", "netns", "add", switch]]
    if bridge:
        commands += [
            ["ip", "-n", switch, "link", "add", "br0", "type", "bridge"],
            ["ip", "-n", switch, "link", "set", "br0", "addrgenmode", "none", "up"],
        ]
    master = ["master", "br0"] if bridge else []
    for host in range(hosts):
        name, port = _namespace(tag, host), f"p{host}"
        pair = f"link add {port} type veth peer name {INTERFACE} netns {name}"
        # No IPv6 addresses: their neighbour discovery would be counted as traffic.
        commands += [
            ["ip", "netns", "add", name],
            ["ip", "-n", switch, *pair.split()],
            ["ip", "-n", switch, "link", "set", port, *master, "addrgenmode", "none", "up"],
            ["ip", "-n", name, "link", "set", "lo", "up"],
            ["ip", "-n", name, "addr", "add", f"{address(host)}/24", "dev", INTERFACE],
            ["ip", "-n", name, "link", "set", INTERFACE, "addrgenmode", "none", "up"],
        ]
    return commands


def rate_command(namespace: str, rate: Rate) -> list[str]:
    """The command that shapes what a namespace sends, or (unlimited) ends that."""
    if rate.bits_per_second is None:
        return ["tc", "-n", namespace, "qdisc", "del", "dev", INTERFACE, "root"]
    shaper = f"tbf rate {rate.bits_per_second}bit burst {rate.burst} latency {_LATENCY}"
    return ["tc", "-n", namespace, *f"qdisc replace dev {INTERFACE} root {shaper}".split()]


def address(host: int) -> str:
    """IPv4 address of a host, inside its namespace."""
    return f"10.77.0.{host + 1}"


class Network:
    """A namespace for every host of ``ranks`` ranks on one switch, from ``__enter__`` until
    ``__exit__``.

    Names hold this process's id, so that two runs do not collide. What a killed run left behind
    is removed on entry.

    Args:
        latency: seconds that a packet takes from one host to another.

    Raises:
        NetworkUnavailable: on entry, if this machine cannot do it; nothing is left behind.
    """

    def __init__(self, ranks: int, ranks_per_host: int = 1, latency: float = 0.0) -> None:
        self.ranks, self.ranks_per_host = ranks, ranks_per_host
        self.hosts = ranks // ranks_per_host
        self._latency = latency
        self._delayer: subprocess.Popen[str] | None = None
        self._tag = f"{_PREFIX}-{os.getpid()}"
        self._rate = Rate(None)

    @property
    def namespaces(self) -> list[str]:
        """Names of the hosts' namespaces."""
        return [_namespace(self._tag, host) for host in range(self.hosts)]

    def __enter__(self) -> Network:
        check_requirements()
        remove_stale()
        try:
            for command in creation_commands(self._tag, self.hosts, bridge=not self._latency):
                _run(command)
            if self._latency:
                self._delayer = _start_delayer(_switch(self._tag), self._latency, self.hosts)
            for namespace in self.namespaces:
                _set_congestion_control(namespace)
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
        self.close()

    def close(self) -> None:
        """Remove all namespaces; with them go interfaces and shapers."""
        if self._delayer is not None:
            self._delayer.kill()
            self._delayer.communicate()
            self._delayer = None
        here = set(existing())
        for name in (*self.namespaces, _switch(self._tag)):
            if name in here:
                _run(["ip", "netns", "del", name])

    def limit(self, rate: Rate) -> None:
        """Let every host send at ``rate`` from now on."""
        if rate == self._rate:
            return
        for namespace in self.namespaces:
            _run(rate_command(namespace, rate))
        self._rate = rate

    def command(self, rank: int, argv: Sequence[str]) -> list[str]:
        """``argv``, to be run on a rank's host; the process is ``argv``'s own."""
        return ["ip", "netns", "exec", self.namespaces[rank // self.ranks_per_host], *argv]


def existing() -> list[str]:
    """Names of all namespaces of this benchmark on this machine."""
    listed = _run(["ip", "netns", "list"]).splitlines()
    names = (line.split()[0] for line in listed if line.strip())
    return [name for name in names if _NAME.match(name)]


def remove_stale() -> list[str]:
    """Remove the namespaces of runs whose process is gone; returns their names."""
    stale = []
    for name in existing():
        found = _NAME.match(name)
        if found and not Path(f"/proc/{found[1]}").exists():
            try:
                _run(["ip", "netns", "del", name])
            except NetworkUnavailable:
                # Another run that begins now may have been quicker.
                if name in existing():
                    raise
            stale.append(name)
    return stale


def _namespace(tag: str, host: int) -> str:
    return f"{tag}-h{host}"


def _switch(tag: str) -> str:
    return f"{tag}-switch"


def _start_delayer(switch: str, latency: float, ports: int) -> subprocess.Popen[str]:
    names = [f"p{host}" for host in range(ports)]
    command = [sys.executable, "-m", "benchmarks.network.latency", f"{latency:.9f}", *names]
    made = subprocess.Popen(
        ["ip", "netns", "exec", switch, *command],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Ctrl-C is for the benchmark, which ends it.
        start_new_session=True,
    )
    assert made.stdout is not None
    if made.stdout.readline() != "ready\n":
        raise NetworkUnavailable(f"the switch with latency failed: {made.communicate()[1].strip()}")
    return made


def _set_congestion_control(namespace: str) -> None:
    setting, inside = "/proc/sys/net/ipv4/tcp_%s", ["ip", "netns", "exec", namespace]
    allowed = _run([*inside, "cat", setting % "allowed_congestion_control"])
    chosen = next((name for name in _CONGESTION_CONTROL if name in allowed.split()), None)
    if chosen:
        _run([*inside, "sh", "-c", f"echo {chosen} > {setting % 'congestion_control'}"])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetworkUnavailable(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout
