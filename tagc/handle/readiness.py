"""Before the first step, compiles kernels, once per host, and compares them with the reference.

A rehearsal of the plan's steps records the operators that they will call, and the arguments. The
operators are compiled for these calls and run on small inputs; their outputs are compared with
those of the reference on the CPU.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from tagc.attach import Unit
from tagc.basics.files import locked
from tagc.basics.progress import Progress
from tagc.collect import rehearse
from tagc.ops import Ops, compiles_ahead, get_ops
from tagc.plan import Plan
from tagc.selfcheck import Recorder, check


def make_ready(plan: Plan, ops: Ops, device: torch.device, *, shown: bool) -> str | None:
    """Compile and check the operators of ``ops`` that the plan's units will call on ``device``.

    Returns:
        A note for users on what was checked; None if the implementation is not compiled ahead.
    """
    if not compiles_ahead(ops):
        return None
    progress = Progress("operators compiled, cached for later runs", shown=shown)
    recorder = Recorder(ops, progress.step)
    current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with _with_a_compiler(), current:
        # The ranks of a host take turns: those after the first find compiled kernels.
        with locked(_folder(), "kernels"), ops.compiling_only():
            rehearse(plan, recorder.ops, stamped=device.type != "cpu")
        progress.end()
        progress = Progress("operators checked", len(recorder.calls), shown=shown)
        checked = check(ops, device, recorder.calls, progress=lambda _: progress.step())
        progress.end()
    return f"kernels: {checked}"


@contextmanager
def _with_a_compiler() -> Iterator[None]:
    """Explain a missing C compiler: Triton builds the launcher of each kernel with it."""
    try:
        yield
    except (RuntimeError, subprocess.CalledProcessError) as error:
        if isinstance(error, RuntimeError) and "C compiler" not in str(error):
            raise
        raise RuntimeError(
            "tagc: Triton could not build its kernel launcher on this host. It needs a C "
            "compiler and Python's headers: install gcc and python3-dev (or what your system calls "
            "them) on every host, or name a compiler by the environment variable CC. "
            f"TAGC_OPS=reference needs neither, but is slow. Triton's error: {error}"
        ) from error


def _folder() -> Path:
    """This user's folder for the lock, named by number: in containers a user may have no name."""
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir()) / f"tagc-{user}"


def with_kernels(units: Sequence[Unit], plan: Plan, ops: str | None) -> Plan:
    """Compile and check the plan's kernels; the plan gets notes on them."""
    notes = []
    if any(unit_plan.compressed for unit_plan in plan.all_units):
        shown = dist.get_rank() == 0
        for device in dict.fromkeys(unit.device for unit in units):
            chosen = get_ops(device, ops)
            notes.append(make_ready(plan, chosen, device, shown=shown))
    notes = (*plan.notes, *(note for note in notes if note is not None))
    return replace(plan, notes=notes)
