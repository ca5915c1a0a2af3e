"""``tagc doctor``: checks the operators on this machine, and prints the facts for a bug report."""

from __future__ import annotations

import time

import torch

from tagc.basics.progress import Progress
from tagc.ops import compiles_ahead, get_ops
from tagc.selfcheck.checking import Checked, check
from tagc.selfcheck.everything import every_call
from tagc.selfcheck.platform import about


def examine(device: torch.device, ops: str | None = None, *, every: bool = False) -> Checked:
    """Print the device and its software, and check the operators.

    Args:
        device: the device to run on.
        ops: implementation, see :func:`tagc.ops.get_ops`.
        every: check all kinds of calls on a CPU too, where compiling them takes minutes. If false,
            a CPU checks one call of every operator.

    Returns:
        The calls that passed and failed.
    """
    for name, value in about(device, driver=True).items():
        print(f"{name:12}{value}")
    implementation = get_ops(device, ops)
    calls = list(every_call())
    if not every and not compiles_ahead(implementation):
        calls = list({call.operator: call for call in reversed(calls)}.values())
    begin, progress = time.monotonic(), Progress("operators checked", len(calls))
    checked = check(implementation, device, calls, progress=lambda _: progress.step(), go_on=True)
    progress.end()
    for call, complaint in checked.failures.items():
        print(f"WRONG       {call}: {complaint}")
    print(
        f"operators   {len(checked.calls)} of {len(calls)} kinds of calls give the reference's "
        f"bits ({time.monotonic() - begin:.0f} s)",
        flush=True,
    )
    return checked
