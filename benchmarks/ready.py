"""``ready``: the CPU's part of what :func:`tagc.wrap` does on a GPU before the first step.

A rehearsal of a model's plan compiles kernels into an empty cache. The recorded calls then run on
small inputs, aligned and not, beside the reference; this compiles more variants of the kernels.
Here CPU operators take the place of the GPU's, so the times are those of the CPU's part: it makes
inputs and runs the reference.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch

from tagc.collect import rehearse
from tagc.costs.explain import plan_shapes
from tagc.costs.shapes import ModelShapes, synthetic
from tagc.ops import compiles_ahead, get_ops
from tagc.policy import Policy, data_parallel_policies
from tagc.selfcheck import Recorder, check
from tagc.selfcheck.cases import case_of
from tagc.selfcheck.placement import PLACEMENTS

from .records import Record, markdown

__all__ = ["about", "add_arguments", "ready", "run", "table"]

about = "kernels that tagc.wrap compiles and checks before the first step; needs no GPU"
RANKS = 8
_ARCH = 90
_BF16 = torch.bfloat16
_CPU = torch.device("cpu")


def ready(policy: str, shapes: ModelShapes | None = None) -> Record:
    """Compile and check what a policy needs.

    Args:
        shapes: of the model; default: a transformer of 7e9 parameters.
    """
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from .compiled import Compiler

    shapes = synthetic(7_000_000_000) if shapes is None else shapes
    plan = plan_shapes(
        shapes, Policy.load(policy), world_size=RANKS, replicas=1, dtype=_BF16,
        parameter_dtype=_BF16, choose=None,
    )  # fmt: skip
    ops = get_ops("cuda", "triton")
    assert compiles_ahead(ops)
    recorder = Recorder(ops)
    variants: dict[str, str] = {}
    launch = JITFunction.run

    def compiling(self: Any, *args: Any, **options: Any) -> Any:
        kernel: Any = launch(self, *args, **options)
        variants[kernel.hash] = self.__name__.removesuffix("_kernel")
        return kernel

    with (
        tempfile.TemporaryDirectory() as cache,
        mock.patch.dict(os.environ, TRITON_CACHE_DIR=cache),
        # Another name each time: a process keeps the kernels that it compiled for a device.
        mock.patch.object(driver, "_active", Compiler(_ARCH, f"{time.monotonic_ns()}")),
        mock.patch.object(JITFunction, "run", compiling),
        ops.compiling_only(),
    ):
        times = [time.perf_counter()]
        rehearse(plan, recorder.ops)
        times.append(time.perf_counter())
        of_steps = sorted(variants.values())
        for call, place in itertools.product(recorder.calls, PLACEMENTS.values()):
            case_of(call).run(ops, lambda x, place=place: place(x, _CPU))
        times.append(time.perf_counter())
    stand_in = get_ops(_CPU, "cpu")
    # Run once to compile, and to check that all agree; a call that passed is not run again.
    check(stand_in, _CPU, recorder.calls)
    with mock.patch("tagc.selfcheck.checking._PASSED", set()):
        begin = time.perf_counter()
        check(stand_in, _CPU, recorder.calls)
        checked = time.perf_counter()
    return {
        "policy": policy,
        "calls": recorder.count,
        "kinds": len(recorder.calls),
        "variants": of_steps,
        "compile_s": round(times[1] - times[0], 2),
        "more_variants": len(variants) - len(of_steps),
        "compile_more_s": round(times[2] - times[1], 2),
        "check_s": round(checked - begin, 3),
    }


def table(records: Sequence[Record]) -> str:
    """A Markdown table with a line for each policy."""
    head = [
        "policy", "kernels for a step", "compiled in", "kinds of calls", "kernels more to check",
        "compiled in", "the CPU's part of the check",
    ]  # fmt: skip
    return markdown(
        head,
        (
            (
                r["policy"], len(r["variants"]), f"{r['compile_s']:.1f} s", r["kinds"],
                r["more_variants"], f"{r['compile_more_s']:.1f} s", f"{r['check_s']:.2f} s",
            )
            for r in records
        ),
    )  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this suite."""
    parser.add_argument(
        "policy", nargs="*", help="names or files (default: all shipped policies that compress)"
    )


def run(args: argparse.Namespace) -> int:
    """Compile and check, one policy after the other, on one thread; print the table."""
    try:
        import triton.compiler  # noqa: F401
    except ModuleNotFoundError:
        print("no Triton here: it is for Linux on x86-64", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    results: list[Record] = []
    for policy in args.policy or [
        n for n in data_parallel_policies() if n not in ("auto", "dense")
    ]:
        results.append(ready(policy))
        print(f"{policy}: {', '.join(results[-1]['variants'])}", file=sys.stderr, flush=True)
    print(table(results))
    return 0
