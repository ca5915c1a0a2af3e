"""The subcommands of ``tagc``: functions that take the arguments and return an exit status."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from dataclasses import asdict

import torch

from tagc.basics.plots import PlotsUnavailableError
from tagc.commands.advice import advise
from tagc.commands.given import (
    DTYPES,
    EXPLAIN,
    check_ranks,
    check_tokens,
    mesh_of,
    of_mesh,
    print_json,
    refuse_without_effect,
)
from tagc.costs.auto import FastestChoice, is_automatic
from tagc.costs.codec_time import no_time
from tagc.costs.data import plan_data
from tagc.costs.dimensions import (
    activation_traffic,
    one_stage,
    traffic_table,
)
from tagc.costs.explain import plan_shapes, plan_sites
from tagc.costs.link import Link
from tagc.costs.models import load_model
from tagc.costs.shapes import ModelError, ModelShapes
from tagc.plan import Plan
from tagc.policy import Policy, PolicyError, json_schema, show
from tagc.policy import policies as listed_policies
from tagc.selfcheck import examine


def run(args: argparse.Namespace) -> int:
    """Run the subcommand that the arguments name. Returns 2 if the input is not valid."""
    try:
        return _COMMANDS[args.command](args)
    except (PolicyError, ModelError, PlotsUnavailableError) as error:
        print(_printable(str(error)), file=sys.stderr)
        return 2
    except BrokenPipeError:  # `tagc explain 7B | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _printable(text: str) -> str:
    """Text with control characters escaped, so that a terminal does not obey them."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def _policies(args: argparse.Namespace) -> int:
    listed = listed_policies()
    if args.json:
        return print_json([{"name": name, "about": about} for name, about in listed.items()])
    width = max(map(len, listed))
    for name, about in listed.items():
        print(f"{name:{width}}  {about}")
    return 0


def _validate(args: argparse.Namespace) -> int:
    policy = Policy.load(args.file)
    said = ", ".join(
        f"{len(rules)} for {what}"
        for what, rules in (
            ("gradients", policy.gradients),
            ("parameters", policy.parameters),
            ("replicas", policy.replicas),
        )
        if rules
    )
    count = len(policy.gradients) + len(policy.parameters) + len(policy.replicas)
    print(f"ok {policy.name}: {count} rule{'' if count == 1 else 's'} ({said})")
    return 0


def _show(args: argparse.Namespace) -> int:
    print(show(args.file), end="")
    return 0


def _schema(args: argparse.Namespace) -> int:
    print(json_schema(), end="")
    return 0


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
    wrong = bool(examine(device, args.ops, every=args.all).failures)
    if not args.no_timing:
        wrong |= bool(_benchmarks(["kernels", "--quick", "--device", kind]))
    print("If anything here is wrong, paste all of this into your report.")
    return int(wrong)


def _benchmarks(argv: list[str]) -> int:
    # Imported here because the benchmarks import much that the other commands do not need.
    return importlib.import_module("tagc.benchmarks.suites").main(argv)


def _explain(args: argparse.Namespace) -> int:
    if args.model in listed_policies() or args.params is not None:
        policy = args.model if args.model in listed_policies() else args.policy
        model = args.params or "7B"
        raise ModelError(
            f"the model comes first, and the policy is an option: tagc explain {model} "
            f"--policy {policy} --world {args.world or 64}"
        )
    mesh, policy = mesh_of(args), Policy.load(args.policy)
    alone = mesh is not None and args.world == 1
    holds = {
        "with a policy for sites": policy.sites is not None,
        "with a policy that is not for sites": policy.sites is None,
        "with a policy without codec auto": not is_automatic(policy),
        "with one data-parallel rank": alone,
        "with one data-parallel rank and without --json": alone and not args.json,
    }
    refuse_without_effect(args, EXPLAIN, of_mesh(args, mesh) | holds)
    check_tokens(args)
    if not alone:
        check_ranks(args)
    shapes = load_model(args.model)
    traffic = None
    if mesh is not None:
        traffic = activation_traffic(
            shapes,
            policy,
            mesh,
            tokens=args.tokens,
            itemsize=DTYPES[args.param_dtype].itemsize,
            experts_per_token=args.experts_per_token,
            micro_batches=args.micro_batches,
        )
        shapes = one_stage(shapes, mesh)
        if alone and not args.json:
            print(traffic_table(traffic, args.tokens))
            return 0
    choose = None
    if args.bandwidth is not None:
        per_host = args.ranks_per_host
        link = Link(bandwidth=args.bandwidth, latency=args.latency, ranks_per_host=per_host)
        note = "chosen for the given link; codec time is not included"
        choose = FastestChoice(lambda _, direction: link, no_time, (note,), args.micro_batches)
    elif is_automatic(policy):
        raise ModelError(f"policy {policy.name!r} chooses by the link: give --bandwidth")
    if policy.sites is not None:
        plan = _plan_sites(args, shapes, policy)
    else:
        plan = plan_shapes(
            shapes,
            policy,
            world_size=args.world,
            replicas=args.replicas,
            ranks_per_host=args.ranks_per_host,
            ddp=args.ddp,
            dtype=DTYPES[args.dtype],
            parameter_dtype=DTYPES[args.param_dtype],
            choose=choose,
            micro_batches=args.micro_batches,
        )
    for warning in plan.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if args.json:
        data = plan_data(shapes, plan, full=args.full)
        if traffic is not None:
            data["dimensions"] = [asdict(each) for each in traffic]
        return print_json(data)
    source = f" ({shapes.source})" if shapes.source else ""
    print(f"{shapes.numel:,} parameters, {len(shapes.blocks)} blocks, {args.world} ranks{source}")
    print(plan.full if args.full else plan)
    if traffic is not None:
        print(f"\n{traffic_table(traffic, args.tokens)}")
    return 0


def _plan_sites(args: argparse.Namespace, shapes: ModelShapes, policy: Policy) -> Plan:
    try:
        return plan_sites(shapes, policy, world_size=args.world, sites=args.sites)
    except PolicyError as error:
        raise ModelError(f"{error} (--sites)" if args.sites < 2 else str(error)) from None
    except ValueError as error:
        raise ModelError(str(error)) from None


_COMMANDS = {
    "policies": _policies,
    "validate": _validate,
    "show": _show,
    "schema": _schema,
    "bench": _bench,
    "doctor": _doctor,
    "explain": _explain,
    "advise": advise,
}
