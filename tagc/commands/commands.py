"""The subcommands of ``tagc``: functions that take the arguments and return an exit status."""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import sys
from collections.abc import Callable

import torch

from tagc.basics.plots import PlotsUnavailableError
from tagc.collect import rehearse
from tagc.commands.advice import advise, as_json, explain
from tagc.costs.auto import is_automatic
from tagc.costs.explain import Setting
from tagc.costs.shapes import ModelError, synthetic
from tagc.ops.exponents import ExponentLayout
from tagc.ops.sketch import plan_layout
from tagc.ops.symbols import SYMBOLS
from tagc.plan import aligned
from tagc.policy import Policy, PolicyError, data_parallel_policies, json_schema, show
from tagc.policy import policies as listed_policies
from tagc.policy.policy import DIRECTIONS
from tagc.selfcheck import Call, Recorder, examine, sketch_calls
from tagc.selfcheck.calls import exponent_calls


def run(args: argparse.Namespace) -> int:
    """Run the subcommand that the arguments name. Returns 2 if the input is not valid."""
    try:
        found = _COMMANDS[args.command](args)
        if isinstance(found, str):
            print(found)
        return found if isinstance(found, int) else 0
    except (PolicyError, ModelError, PlotsUnavailableError) as error:
        print(_printable(str(error)), file=sys.stderr)
        return 2
    except BrokenPipeError:  # `tagc explain 7B | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _printable(text: str) -> str:
    """Text with control characters escaped, so that a terminal does not obey them."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def _policies(args: argparse.Namespace) -> str:
    listed = listed_policies()
    if args.json:
        return as_json([{"name": name, "about": about} for name, about in listed.items()])
    return "\n".join(aligned([*listed.items()], left=(0, 1)))


def _validate(args: argparse.Namespace) -> str:
    policy = Policy.load(args.file)
    counts = {what: len(getattr(policy, what)) for what in DIRECTIONS}
    each = ", ".join(f"{n} for {what}" for what, n in counts.items() if n)
    count = sum(counts.values())
    return f"ok {policy.name}: {count} rule{'' if count == 1 else 's'} ({each})"


def _bench(args: argparse.Namespace) -> int:
    argv = ["kernels", "--quick"]
    for option in ("device", "json", "plots"):
        value = getattr(args, option)
        argv += [] if value is None else [f"--{option}", value]
    return _benchmarks(argv)


def _doctor(args: argparse.Namespace) -> int:
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here", file=sys.stderr)
        return 2
    kind = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = (
        torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    )
    wrong = not examine(device, _calls(device))
    if not args.no_timing:
        wrong |= bool(_benchmarks(["kernels", "--quick", "--device", kind]))
    print("If anything here is wrong, paste all of this into your report.")
    return int(wrong)


def _calls(device: torch.device) -> list[Call]:
    """The kinds of calls of the operators that the built-in policies make, and of what is used
    beside them."""
    recorder, shapes = Recorder(), synthetic(10**9)
    for policy in map(Policy.load, data_parallel_policies()):
        for dtype in (torch.float32, torch.bfloat16) if not is_automatic(policy) else ():
            plan = Setting(shapes=shapes, world_size=8, dtype=dtype).plan(policy)
            rehearse(plan, recorder.ops, stamped=device.type != "cpu")
    others = (sketch_calls(plan_layout(1 << 20, symbol, 1 << 10)) for symbol in SYMBOLS.values())
    return [*recorder.calls, *itertools.chain(*others), *exponent_calls(ExponentLayout(numel=8192))]


def _benchmarks(argv: list[str]) -> int:
    # Imported here because the benchmarks import much that the other commands do not need.
    return importlib.import_module("tagc.benchmarks.suites").main(argv)


# They return what to print, or an exit status.
_COMMANDS: dict[str, Callable[[argparse.Namespace], str | int]] = {
    "policies": _policies,
    "validate": _validate,
    "show": lambda args: show(args.file).removesuffix("\n"),
    "schema": lambda args: json_schema().removesuffix("\n"),
    "bench": _bench,
    "doctor": _doctor,
    "explain": explain,
    "advise": advise,
}
