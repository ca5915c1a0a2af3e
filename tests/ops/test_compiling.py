"""Ranks of a host compile one after the other, the later ones from the cache."""

from __future__ import annotations

import threading
import time

from tagc.ops.cpu.arrays import once_a_host


def test_one_compiles_at_a_time() -> None:
    """Threads stand for processes: a lock on a file that each of them opened counts alike."""
    inside, most = 0, 0

    def compile_for(what: str) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.05)
        inside -= 1

    ranks = [threading.Thread(target=once_a_host(compile_for), args=("x",)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert most == 1


def test_a_process_compiles_once_for_the_same() -> None:
    compiled = []
    once = once_a_host(compiled.append)
    for what in ("x", "y", "x"):
        once(what)
    assert compiled == ["x", "y"]
