"""Run a script with every rank in a namespace of its own, as torchrun would on hosts that share a
link. `make demo LINK=100mbit` uses it.

    python -m benchmarks.network.launch --ranks 2 --rate 100mbit examples/train_gpt.py --steps 40
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

from .namespaces import Network, NetworkUnavailable, Rate
from .ranks import environment


def main() -> int:
    """The exit status of the first rank that fails; the others are ended then. 2 if namespaces
    cannot be made here."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.network.launch")
    parser.add_argument("--ranks", type=int, default=2, help="ranks, each on a host of its own")
    parser.add_argument(
        "--rate", type=Rate.parse, required=True, help="what a host may send: 1gbit"
    )
    parser.add_argument("script", help="Python file to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    args = parser.parse_args()
    try:
        with Network(args.ranks) as network:
            network.limit(args.rate)
            return run(network, [sys.executable, args.script, *args.arguments])
    except NetworkUnavailable as error:
        print(f"launch: {error}", file=sys.stderr)
        return 2


def run(network: Network, command: list[str]) -> int:
    """Run a command on every rank; the status of the first that fails, or 0."""
    processes = [_start(network, rank, command) for rank in range(network.ranks)]
    try:
        while True:
            codes = [process.poll() for process in processes]
            failed = [code for code in codes if code]
            if failed or None not in codes:
                return failed[0] if failed else 0
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _start(network: Network, rank: int, command: list[str]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(network.command(rank, command), env=environment(network, rank))
    # A host has its own cores, or its rank would start a thread for every core of the machine.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(process.pid, cores[rank :: network.ranks] or cores)
    return process


if __name__ == "__main__":
    sys.exit(main())
