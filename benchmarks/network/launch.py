"""A rate-limited network on one machine, and ranks that run in it as torchrun would run them on
hosts: a network namespace per host, all on one switch.

    python -m benchmarks.network.launch --ranks 2 --rate 100mbit examples/train_gpt.py --steps 40

The switch is a bridge in a namespace of its own: nothing can reach the machine, and nothing of it
is changed. If links have latency, the switch is a process (``latency.py``). A host has one rank, or
several, which reach each other over its loopback, without a limit. What it sends over its one
interface, ``e0``, is shaped by a token bucket (``tc``, tbf); what it receives is not.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import pickle
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from tagc.basics.quantities import bandwidth, format_bandwidth

INTERFACE = "e0"
_TIMEOUT = timedelta(minutes=15)
_WORK = "--work"
_COUNTER = Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes")
_PR_SET_PDEATHSIG = 1
_ROOT = Path(__file__).parents[2]
_PREFIX = "tagcnet"
# Queueing that a packet may meet in the bucket; more than TCP keeps there, so that none is lost.
_LATENCY = "50ms"
_LEAST_BURST = 68 * 1024
# The usual default, then the one that every namespace may use: with the host's own choice (bbr
# probes the link every few seconds) results would depend on it.
_CONGESTION_CONTROL = ("cubic", "reno")


class NetworkUnavailable(ValueError):  # noqa: N818 - it is a state of the machine
    """This machine, or this user, cannot make a network of namespaces; the message says why."""


UNLIMITED = "unlimited"
"""A rate is a text: this one, or what a host may send, such as ``100mbit``."""


def bits_per_second(rate: str) -> float:
    """What a host may send; infinite without a limit."""
    return math.inf if rate == UNLIMITED else 8 * bandwidth(rate[:-4] + rate[-4:].capitalize())


def rates(text: str) -> tuple[str, ...]:
    """Of texts with commas between them, which must be rates."""
    found = tuple(text.split(","))
    for rate in found:
        bits_per_second(rate)
    return found


def label(rate: str) -> str:
    """For people: ``10 Gbit/s``."""
    return rate if rate == UNLIMITED else format_bandwidth(bits_per_second(rate) / 8)


def burst(rate: str) -> int:
    """Bytes that go at once after a pause on a limited link: a millisecond of tokens (with fewer,
    timers and not the rate limit a fast link), and no less than a large packet."""
    return max(_LEAST_BURST, round(bits_per_second(rate) / 8000))


def check_requirements() -> None:
    """Raise :class:`NetworkUnavailable` unless this process can make namespaces."""
    if os.geteuid() != 0:
        container = "in a container with CAP_NET_ADMIN and CAP_SYS_ADMIN"
        raise NetworkUnavailable(f"network namespaces need root: use sudo, or be root {container}")
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise NetworkUnavailable(f"{' and '.join(missing)} not found: install iproute2")


def _creation_commands(tag: str, hosts: int, *, bridge: bool) -> list[str]:
    """The commands that make the switch and the hosts' namespaces, links and addresses. Without
    ``bridge`` the switch's ports are left unconnected."""
    switch, master = f"{tag}-switch", "master br0 " if bridge else ""
    commands = [f"ip netns add {switch}"]
    if bridge:
        commands.append(f"ip -n {switch} link add br0 type bridge")
        commands.append(f"ip -n {switch} link set br0 addrgenmode none up")
    for host in range(hosts):
        name = f"{tag}-h{host}"
        # No IPv6 addresses: their neighbour discovery would be counted as traffic.
        commands += [
            f"ip netns add {name}",
            f"ip -n {switch} link add p{host} type veth peer name {INTERFACE} netns {name}",
            f"ip -n {switch} link set p{host} {master}addrgenmode none up",
            f"ip -n {name} link set lo up",
            f"ip -n {name} addr add {_address(host)}/24 dev {INTERFACE}",
            f"ip -n {name} link set {INTERFACE} addrgenmode none up",
        ]
    return commands


def _rate_command(rate: str) -> str:
    """Shapes what the namespace sends that runs it, or (unlimited) ends that."""
    if rate == UNLIMITED:
        return f"tc qdisc del dev {INTERFACE} root"
    shaper = f"tbf rate {bits_per_second(rate):.0f}bit burst {burst(rate)} latency {_LATENCY}"
    return f"tc qdisc replace dev {INTERFACE} root {shaper}"


def _address(host: int) -> str:
    """IPv4 address of a host, inside its namespace."""
    return f"10.77.0.{host + 1}"


class Network:
    """A namespace for every host of ``ranks`` ranks on one switch, from ``__enter__`` until
    ``__exit__``. Entering removes what a killed run left behind.

    Args:
        rate: what a host may send.
        latency: seconds that a packet takes from one host to another.

    Raises:
        NetworkUnavailable: on entry, if this machine cannot do it; nothing is left behind.
    """

    def __init__(
        self, ranks: int, ranks_per_host: int = 1, *, rate: str = UNLIMITED, latency: float = 0.0
    ) -> None:
        self.ranks, self.ranks_per_host = ranks, ranks_per_host
        self._rate, self._latency = rate, latency
        self._tag = f"{_PREFIX}-{os.getpid()}"  # so that two runs do not collide
        self.namespaces = [f"{self._tag}-h{host}" for host in range(ranks // ranks_per_host)]
        self._made = ExitStack()

    def __enter__(self) -> Self:
        check_requirements()
        remove_stale()
        with self._made as made:
            made.callback(_remove, [*self.namespaces, f"{self._tag}-switch"])
            hosts = len(self.namespaces)
            for command in _creation_commands(self._tag, hosts, bridge=not self._latency):
                _run(command)
            if self._latency:
                made.callback(_end, _start_delayer(self._tag, self._latency, hosts))
            for namespace in self.namespaces:
                _set_congestion_control(namespace)
                if self._rate != UNLIMITED:
                    _run(f"ip netns exec {namespace} {_rate_command(self._rate)}")
            self._made = made.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._made.close()

    def run(self, command: Sequence[str], *, pinned: bool = False) -> int:
        """Run a command on every rank; the status of the first that fails, or 0. The others are
        ended then.

        Args:
            pinned: a rank has cores of its own; otherwise only as many threads.
        """
        cores = sorted(os.sched_getaffinity(0))
        processes: list[subprocess.Popen[Any]] = []
        try:
            for rank in range(self.ranks):
                processes.append(self._start(rank, command, max(1, len(cores) // self.ranks)))
                if pinned:
                    os.sched_setaffinity(processes[-1].pid, cores[rank :: self.ranks] or cores)
            while True:
                codes = [process.poll() for process in processes]
                failed = [code for code in codes if code]
                if failed or None not in codes:
                    return failed[0] if failed else 0
                time.sleep(0.1)
        finally:
            for process in processes:
                _end(process)

    def _start(self, rank: int, command: Sequence[str], threads: int) -> subprocess.Popen[Any]:
        host, local = divmod(rank, self.ranks_per_host)
        environment = {
            "RANK": rank,
            "LOCAL_RANK": local,
            "WORLD_SIZE": self.ranks,
            "LOCAL_WORLD_SIZE": self.ranks_per_host,
            "MASTER_ADDR": _address(0),
            "MASTER_PORT": 29500,  # a namespace has all ports to itself
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": threads,
        }
        there = os.environ | {name: str(value) for name, value in environment.items()}
        enter = ["ip", "netns", "exec", self.namespaces[host]]
        return subprocess.Popen([*enter, *command], cwd=_ROOT, env=there)

    def on_ranks(self, work: Callable[..., Any], *args: Any) -> Any:
        """Call ``work(*args)`` on every rank of a gloo group; what it returned on the first."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "work"
            file.write_bytes(pickle.dumps((work, args)))
            status = self.run([sys.executable, "-m", __name__, _WORK, str(file)])
            if status:
                raise RuntimeError(f"a rank failed with status {status}; it wrote why")
            return pickle.loads(file.read_bytes())


def _work(file: Path) -> None:
    """As one of the ranks."""
    import torch
    import torch.distributed as dist

    # A killed parent must not leave ranks behind, even in the middle of a collective.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its ranks
    work, args = pickle.loads(file.read_bytes())
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    result = work(*args)
    dist.barrier()  # all have read their work
    if dist.get_rank() == 0:
        file.write_bytes(pickle.dumps(result))
    dist.destroy_process_group()


def limit(rate: str) -> None:
    """From within a rank: let its host send at ``rate`` from now on."""
    _run(_rate_command(rate))


def sent_bytes() -> int:
    """From within a rank: bytes that the kernel counted on its host's interface."""
    return int(_COUNTER.read_text())


def existing() -> list[str]:
    """Names of all namespaces of this benchmark on this machine."""
    return re.findall(rf"^{_PREFIX}-\d+-\w+", _run("ip netns list"), re.MULTILINE)


def remove_stale() -> None:
    """Remove the namespaces of runs whose process is gone."""
    _remove(name for name in existing() if not Path("/proc", name.split("-")[1]).exists())


def _remove(namespaces: Iterable[str]) -> None:
    """Those that are there; with them go interfaces and shapers."""
    for name in namespaces:
        try:
            _run(f"ip netns del {name}")
        except NetworkUnavailable:
            # Another run that begins now may have been quicker.
            if name in existing():
                raise


def _start_delayer(tag: str, latency: float, hosts: int) -> subprocess.Popen[Any]:
    command = ["ip", "netns", "exec", f"{tag}-switch"]
    command += [sys.executable, "-m", "benchmarks.network.latency", f"{latency:.9f}"]
    command += [f"p{host}" for host in range(hosts)]
    # Ctrl-C is for the benchmark, which ends it.
    how: Any = {"cwd": _ROOT, "text": True, "start_new_session": True}
    made: Any = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **how)
    if made.stdout.readline() != "ready\n":
        raise NetworkUnavailable(f"the switch with latency failed: {made.communicate()[1].strip()}")
    return made


def _end(process: subprocess.Popen[Any]) -> None:
    process.kill()
    process.communicate()


def _set_congestion_control(namespace: str) -> None:
    setting, inside = "/proc/sys/net/ipv4/tcp_%s", f"ip netns exec {namespace}"
    allowed = _run(f"{inside} cat {setting % 'allowed_congestion_control'}").split()
    if name := next((name for name in _CONGESTION_CONTROL if name in allowed), None):
        _run(f"{inside} sh -c 'echo {name} > {setting % 'congestion_control'}'")


def _run(command: str) -> str:
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetworkUnavailable(f"`{command}` failed: {done.stderr.strip()}")
    return done.stdout


def main() -> int:
    """Run a script on every rank, each on a host of its own: the exit status of the first that
    fails; 2 if namespaces cannot be made here."""
    if sys.argv[1:2] == [_WORK]:
        _work(Path(sys.argv[2]))
        return 0
    parser = argparse.ArgumentParser(prog="python -m benchmarks.network.launch")
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="ranks, each on a host of its own")
    add("--rate", type=rates, required=True, help="what a host may send: 1gbit")
    add("script", help="Python file to run")
    add("arguments", nargs=argparse.REMAINDER, help="of the script")
    args = parser.parse_args()
    try:
        with Network(args.ranks, rate=args.rate[0]) as network:
            return network.run([sys.executable, args.script, *args.arguments], pinned=True)
    except NetworkUnavailable as error:
        print(f"launch: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
