"""The subcommands of ``tagc``: functions that take the arguments and return an exit status."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import sys
from dataclasses import asdict, replace
from typing import Any

import torch

from tagc.basics.plots import PlotsUnavailableError, pyplot
from tagc.costs.advise import Advisor, Question, report
from tagc.costs.auto import FastestChoice, is_automatic
from tagc.costs.codec_time import no_time
from tagc.costs.data import advice_data, plan_data
from tagc.costs.dimensions import (
    DATA,
    activation_traffic,
    one_stage,
    parse_mesh,
    traffic_table,
)
from tagc.costs.explain import plan_shapes, plan_sites
from tagc.costs.link import Link
from tagc.costs.models import load_model
from tagc.costs.plot import check_format, draw
from tagc.costs.shapes import ModelError, ModelShapes
from tagc.costs.site_advice import SiteQuestion, site_costs, site_data, site_report
from tagc.plan import Plan
from tagc.policy import Policy, PolicyError, data_parallel_policies, json_schema, show
from tagc.policy import policies as listed_policies
from tagc.selfcheck import examine

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


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
        return _print_json([{"name": name, "about": about} for name, about in listed.items()])
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


def _print_json(data: Any) -> int:
    print(json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False))
    return 0


def _check_ranks(args: argparse.Namespace) -> None:
    if args.world is None:
        raise ModelError("give --world, the total number of ranks")
    if args.world % args.replicas:
        raise ModelError(f"--world {args.world} does not divide by --replicas {args.replicas}")
    if args.world == args.replicas:
        raise ModelError(f"--world {args.world} with as many replicas shards nothing")
    if args.world % args.ranks_per_host:
        raise ModelError(
            f"--world {args.world} does not divide by --ranks-per-host {args.ranks_per_host}"
        )


def _explain(args: argparse.Namespace) -> int:
    if args.model in listed_policies() or args.params is not None:
        policy = args.model if args.model in listed_policies() else args.policy
        model = args.params or "7B"
        raise ModelError(
            f"the model comes first, and the policy is an option: tagc explain {model} "
            f"--policy {policy} --world {args.world or 64}"
        )
    mesh = _mesh_of(args)
    if mesh is None or args.world > 1:
        _check_ranks(args)
    shapes, policy = load_model(args.model), Policy.load(args.policy)
    traffic = None
    if mesh is not None:
        traffic = activation_traffic(
            shapes,
            policy,
            mesh,
            tokens=args.tokens,
            itemsize=_DTYPES[args.param_dtype].itemsize,
            experts_per_token=args.experts_per_token,
        )
        shapes = one_stage(shapes, mesh)
        if args.world == 1 and not args.json:
            print(traffic_table(traffic, args.tokens))
            return 0
    choose = None
    if args.bandwidth is not None:
        per_host = args.ranks_per_host
        link = Link(bandwidth=args.bandwidth, latency=args.latency, ranks_per_host=per_host)
        note = "chosen for the given link; codec time is not included"
        choose = FastestChoice(lambda position, direction: link, no_time, (note,))
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
            dtype=_DTYPES[args.dtype],
            parameter_dtype=_DTYPES[args.param_dtype],
            choose=choose,
        )
    for warning in plan.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if args.json:
        data = plan_data(shapes, plan, full=args.full)
        if traffic is not None:
            data["dimensions"] = [asdict(each) for each in traffic]
        return _print_json(data)
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


def _mesh_of(args: argparse.Namespace) -> dict[str, int] | None:
    """The ranks by dimension, with ``args.world`` set to those that FSDP shards over."""
    if args.mesh is None:
        if args.tokens is not None:
            raise ModelError("--tokens is for --mesh")
        return None
    if args.world is not None or args.tokens is None:
        raise ModelError("with --mesh leave --world out, and give --tokens")
    try:
        mesh = parse_mesh(args.mesh)
    except ValueError as error:
        raise ModelError(str(error)) from None
    args.world = math.prod(mesh.get(name, 1) for name in DATA)
    return mesh


def _advise_sites(args: argparse.Namespace) -> int:
    world = args.sites if args.world is None else args.world
    if world % args.sites:
        raise ModelError(f"--world {world} does not divide by --sites {args.sites}")
    if args.replicas != 1 or args.ranks_per_host != 1 or args.plot is not None:
        raise ModelError("with --sites leave out --replicas, --ranks-per-host and --plot")
    shapes = load_model(args.params or args.model)
    question = SiteQuestion(
        shapes=shapes,
        world_size=world,
        sites=args.sites,
        bandwidth=args.bandwidth,
        latency=args.latency,
        compute=_compute(args, shapes),
        overlap=args.overlap if args.overlap is not None else 0.0 if args.device == "cpu" else 1.0,
    )
    loaded = map(Policy.load, [*listed_policies(), *args.policy])
    policies = [p for p in loaded if not (p.dimensions or is_automatic(p) or p.name == "dense")]
    costs, refused = site_costs(question, policies)
    if args.json:
        return _print_json(site_data(costs, refused))
    print(site_report(question, costs, refused))
    return 0


def _advise(args: argparse.Namespace) -> int:
    if args.sites > 1:
        return _advise_sites(args)
    _check_ranks(args)
    plots = None if args.plot is None else _plots(args.plot)
    on_cpu = args.device == "cpu"
    if args.world == args.ranks_per_host:
        raise ModelError(f"--world {args.world} on a single host: nothing crosses its link")
    link = Link(
        bandwidth=args.bandwidth,
        latency=args.latency,
        inside=args.inside_bandwidth,
        ranks_per_host=args.ranks_per_host,
    )
    within = None
    if args.shard_bandwidth is not None:
        within = replace(link, bandwidth=args.shard_bandwidth, ranks_per_host=1)
    shapes = load_model(args.params or args.model)
    question = Question(
        shapes=shapes,
        world_size=args.world,
        replicas=args.replicas,
        link=link,
        shard_link=within,
        compute=_compute(args, shapes),
        overlap=args.overlap if args.overlap is not None else 0.0 if on_cpu else 1.0,
        dtype=_DTYPES[args.dtype],
        parameter_dtype=_DTYPES[args.param_dtype],
        gloo=on_cpu,
        memory_bandwidth=args.memory_bandwidth,
        ops=args.ops,
        device_memory=args.device_memory,
        micro_batches=args.micro_batches,
    )
    names = [*data_parallel_policies(), *args.policy]
    advisor = Advisor(question, [Policy.load(name) for name in names])
    if plots is not None:
        try:
            draw(advisor, plots, str(args.plot))
        except OSError as error:
            raise ModelError(f"cannot draw to {args.plot}: {error}") from None
    if args.json:
        return _print_json(advice_data(advisor))
    print(report(advisor))
    return 0


def _plots(file: str) -> Any:
    """matplotlib's pyplot; raises before anything takes time."""
    found = pyplot()
    try:
        check_format(found, file)
    except ValueError as error:
        raise ModelError(f"cannot draw to {file}: {error}") from None
    return found


def _compute(args: argparse.Namespace, shapes: ModelShapes) -> float | None:
    given = [args.tokens_per_rank is not None, args.tflops is not None]
    if args.step_time is not None:
        if any(given):
            raise ModelError("give --step-time, or --tokens-per-rank and --tflops, not both")
        return args.step_time
    if not any(given):
        return None
    if not all(given):
        raise ModelError("--tokens-per-rank and --tflops belong together: give both")
    # Two operations per parameter and token in forward, four in backward.
    return 6 * shapes.numel * args.tokens_per_rank / (args.tflops * 1e12)


_COMMANDS = {
    "policies": _policies,
    "validate": _validate,
    "show": _show,
    "schema": _schema,
    "bench": _bench,
    "doctor": _doctor,
    "explain": _explain,
    "advise": _advise,
}
