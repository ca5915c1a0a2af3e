"""Branches and barriers: the threads of a batch, those at the lowest place in the code first.

Threads that branch differently run one after the other and come together again where the first of
them waits for the others to get to the same place.
"""

from __future__ import annotations

import numpy as np

from .faults import DivergenceError
from .parse import Instruction, Kernel
from .registry import Step, step
from .threads import Threads

Array = np.ndarray
# Instructions of one batch, after which a launch is taken to hang.
_PATIENCE = 3_000_000


def compiled(kernel: Kernel) -> list[Step | None]:
    """The steps of a kernel; None for what this file does."""
    return [None if _controls(i) else step(i) for i in kernel.code]


def _controls(i: Instruction) -> bool:
    return i.base in ("bra", "ret", "exit", "bar", "barrier", "fence", "membar")


def run(t: Threads, steps: list[Step | None]) -> None:
    """Run a batch from beginning to end."""
    code, labels = t.kernel.code, t.kernel.labels
    ready: dict[int, Array] = {0: np.full(t.count, True)}
    waiting: dict[int, Array] = {}
    left = _PATIENCE

    def go_on(place: int, lanes: Array) -> None:
        if lanes.any():
            ready[place] = ready[place] | lanes if place in ready else lanes

    while ready or waiting:
        if not ready:
            _release(t, waiting, code)
            ready, waiting = waiting, {}
        place = min(ready)
        here = ready.pop(place)
        mask = None if here.all() else here
        stop = min(ready, default=len(code))
        while True:
            if place >= stop or place == len(code):
                if place < len(code):
                    go_on(place, here)
                break
            left -= 1
            assert left, f"{code[place].where}: {t.kernel.name} does not end"
            i = code[place]
            chosen = mask
            if i.predicate is not None:
                holds = t.read(i.predicate)
                holds = ~holds if i.negated else holds
                chosen = holds if mask is None else holds & mask
                if chosen.all():
                    chosen = None
            do = steps[place]
            if do is not None:
                if chosen is None or chosen.any():
                    t.code = place
                    do(t, chosen)
                place += 1
                continue
            taken = here if chosen is None else chosen
            place += 1
            if i.base == "bra":
                go_on(labels[i.operands[0]], taken)
                go_on(place, here & ~taken)
                break
            if i.base in ("ret", "exit"):
                go_on(place, here & ~taken)
                break
            if i.base in ("fence", "membar"):
                continue
            if i.opcode == "bar.warp.sync":
                t.barrier(chosen, warp=True)
                continue
            assert chosen is mask or chosen is None, f"{i.where}: a barrier under a predicate"
            waiting[place] = waiting[place] | here if place in waiting else here
            break


def _release(t: Threads, waiting: dict[int, Array], code: tuple[Instruction, ...]) -> None:
    """All threads of a program wait at the same barrier, or something is wrong."""
    for place, lanes in waiting.items():
        each = lanes.reshape(-1, t.threads)
        lonely = each.any(1) & ~each.all(1)
        if lonely.any():
            p = int(np.nonzero(lonely)[0][0])
            raise DivergenceError(
                f"{code[place - 1].where}: {int(each[p].sum())} of {t.threads} threads of program "
                f"{int(t.number[p * t.threads])} wait at a barrier that the others do not reach"
            )
        t.barrier(lanes)
