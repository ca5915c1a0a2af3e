"""``tagc explain`` and ``tagc advise``: what a policy does to a model, and whether compression pays
for one link, each dimension of a mesh, or sites."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from tagc.basics.plots import pyplot
from tagc.codecs.exact import ExactConfig
from tagc.costs.advise import advice_data, draw, report, site_costs, site_report
from tagc.costs.auto import is_automatic
from tagc.costs.candidates import DTYPES, Advisor, Question
from tagc.costs.dimensions import (
    DATA,
    DimensionTraffic,
    activation_traffic,
    advice_table,
    advise_dimensions,
    data_ranks,
    link_of,
    one_stage,
    parse_mesh,
    traffic_table,
)
from tagc.costs.explain import Setting, plan_data
from tagc.costs.link import Link
from tagc.costs.model_files import load_model
from tagc.costs.shapes import ModelError, ModelShapes
from tagc.plan import Plan
from tagc.policy import Policy, PolicyError, data_parallel_policies, policies


def explain(args: argparse.Namespace) -> str:
    listed = policies()
    if args.model in listed or args.params is not None:
        policy = args.model if args.model in listed else args.policy
        raise ModelError(
            f"the model comes first, and the policy is an option: tagc explain "
            f"{args.params or '7B'} --policy {policy} --world {args.world or 64}"
        )
    mesh, policy = _mesh(args), Policy.load(args.policy)
    alone = mesh is not None and args.world == 1
    of_sites = policy.sites is not None
    exact = any(isinstance(r.codec, ExactConfig) and r.codec.keep_copy for r in policy.parameters)
    _refuse_without_effect(
        args,
        mesh,
        (
            of_sites,
            "with a policy for sites",
            "ddp replicas ranks_per_host dtype param_dtype bandwidth latency micro_batches",
        ),
        (not of_sites, "with a policy that is not for sites", "sites"),
        (not is_automatic(policy), "with a policy without codec auto", "bandwidth latency"),
        (not exact, "with a policy without exact changes", "learning_rate"),
        (
            alone,
            "with one data-parallel rank",
            "replicas ranks_per_host dtype bandwidth latency micro_batches learning_rate",
        ),
    )
    if not alone:
        _check_ranks(args)
    shapes = load_model(args.model)
    traffic = None
    if mesh is not None:
        traffic = _traffic(args, shapes, policy, mesh)
        shapes = one_stage(shapes, mesh)
        if alone and not args.json:
            return traffic_table(traffic, args.tokens)
    plan = _plan(args, shapes, policy)
    for warning in plan.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if args.json:
        beside = {} if traffic is None else {"dimensions": [asdict(each) for each in traffic]}
        return as_json(plan_data(shapes, plan) | beside)
    source = f" ({shapes.source})" if shapes.source else ""
    head = f"{shapes.numel:,} parameters, {len(shapes.blocks)} blocks, {args.world} ranks{source}"
    beside = "" if traffic is None else f"\n\n{traffic_table(traffic, args.tokens)}"
    return f"{head}\n{plan}{beside}"


def _plan(args: argparse.Namespace, shapes: ModelShapes, policy: Policy) -> Plan:
    if args.bandwidth is None and is_automatic(policy):
        raise ModelError(f"policy {policy.name!r} chooses by the link: give --bandwidth")
    try:
        link = None if args.bandwidth is None else _link(args)
        return Setting(**_setting(args, shapes)).plan(policy, link=link)
    except PolicyError as error:
        option = " (--sites)" if policy.sites is not None and args.sites < 2 else ""
        raise PolicyError(f"{error}{option}") from None


def advise(args: argparse.Namespace) -> str:
    mesh = _mesh(args)
    together = 1 if mesh is None else data_ranks(mesh, args.ranks_per_host)
    shared = mesh is not None and together == args.world
    compared = [Policy.load(name) for name in (*data_parallel_policies(), *args.policy)]
    of_sites, no_compute = args.sites > 1, args.step_time is None
    no_device = of_sites and (args.overlap is not None or no_compute)
    _refuse_without_effect(
        args,
        mesh,
        (mesh is not None, "with --mesh", "replicas"),
        (
            of_sites,
            "with --sites",
            "mesh tokens experts_per_token replicas ranks_per_host micro_batches dtype param_dtype "
            "inside_bandwidth shard_bandwidth memory_bandwidth device_memory plot learning_rate",
        ),
        # It decides only how much overlaps.
        (no_device, "with --sites and --overlap, or without a compute time", "device"),
        (args.ranks_per_host == 1, "with one rank on each host", "inside_bandwidth"),
        (args.replicas == 1, "without --replicas", "shard_bandwidth"),
        (no_compute, "without a compute time (--step-time)", "overlap"),
        (
            shared,
            "with a --mesh whose data-parallel ranks share a host",
            "step_time overlap device dtype device_memory plot learning_rate",
        ),
    )
    plots = None if args.plot is None else pyplot()
    if of_sites:
        args.world = args.sites if args.world is None else args.world
        if args.world % args.sites:
            raise ModelError(f"--world {args.world} does not divide by --sites {args.sites}")
    shapes = load_model(args.model if args.params is None else args.params)
    if of_sites:
        return _advise_sites(args, shapes)
    link, dimensions, lines = _link(args), [], []
    if mesh is None:
        _check_ranks(args)
    else:
        policy = next((p for p in map(Policy.load, args.policy) if p.dimensions), None)
        policy = policy or Policy.load("hybrid-3d")
        traffic = _traffic(args, shapes, policy, mesh)
        advice = advise_dimensions(traffic, mesh, link, memory_bandwidth=args.memory_bandwidth)
        dimensions = [asdict(each) | {"pays": each.pays} for each in advice]
        lines = advice_table(advice, link, policy) if advice else []
        if shared and together > 1:
            lines += ["", f"FSDP's {together} ranks share a host: leave its traffic to it."]
        if shared:
            return as_json({"dimensions": dimensions}) if args.json else "\n".join(lines)
        lines.append("")
        shapes, link = one_stage(shapes, mesh), link_of(link, together)
        args.ranks_per_host = together
    if args.world == link.ranks_per_host:
        raise ModelError(f"--world {args.world} on a single host: nothing crosses its link")
    advisor = Advisor(_question(args, shapes, link), compared)
    if plots is not None:
        draw(advisor, plots, str(args.plot))
    if args.json:
        return as_json(advice_data(advisor) | {"dimensions": dimensions})
    return "\n".join([*lines, report(advisor)])


def _advise_sites(args: argparse.Namespace, shapes: ModelShapes) -> str:
    question = _question(args, shapes, _link(args))
    loaded = map(Policy.load, [*policies(), *args.policy])
    chosen = [p for p in loaded if not (p.dimensions or is_automatic(p) or p.name == "dense")]
    costs, refused = site_costs(question, chosen)
    if args.json:
        return as_json({"candidates": [asdict(cost) for cost in costs], "refused": refused})
    return site_report(question, costs, refused)


def _question(args: argparse.Namespace, shapes: ModelShapes, link: Link) -> Question:
    within = None
    if args.shard_bandwidth is not None:
        within = replace(link, bandwidth=args.shard_bandwidth, ranks_per_host=1)
    on_cpu = args.device == "cpu"
    return Question(
        **_setting(args, shapes),
        link=link,
        shard_link=within,
        compute=args.step_time,
        overlap=args.overlap if args.overlap is not None else 0.0 if on_cpu else 1.0,
        gloo=on_cpu,
        memory_bandwidth=args.memory_bandwidth,
        device_memory=args.device_memory,
    )


def _setting(args: argparse.Namespace, shapes: ModelShapes) -> dict[str, Any]:
    """The arguments of :class:`Setting` that explain and advise both know."""
    same = ("replicas", "sites", "ranks_per_host", "ddp", "micro_batches", "learning_rate")
    return {name: getattr(args, name) for name in same} | {
        "shapes": shapes,
        "world_size": args.world,
        "dtype": DTYPES[args.dtype],
        "parameter_dtype": DTYPES[args.param_dtype],
    }


def _link(args: argparse.Namespace) -> Link:
    return Link(
        bandwidth=args.bandwidth,
        latency=args.latency,
        inside=getattr(args, "inside_bandwidth", math.inf),
        ranks_per_host=args.ranks_per_host,
    )


def _traffic(
    args: argparse.Namespace, shapes: ModelShapes, policy: Policy, mesh: Mapping[str, int]
) -> list[DimensionTraffic]:
    return activation_traffic(
        shapes,
        policy,
        mesh,
        tokens=args.tokens,
        itemsize=DTYPES[args.param_dtype].itemsize,
        experts_per_token=args.experts_per_token,
        micro_batches=args.micro_batches,
        gloo=getattr(args, "device", "cpu") == "cpu",
    )


def _refuse_without_effect(
    args: argparse.Namespace, mesh: Mapping[str, int] | None, *cases: tuple[bool, str, str]
) -> None:
    """Raise ModelError if an option was given that has no effect, or a mesh without tokens.

    Args:
        cases: whether a situation holds, its name, and the options without effect in it; besides
            those that both commands know.
    """
    shared = (
        (args.ddp, "with --ddp", "replicas sites mesh param_dtype learning_rate shard_bandwidth"),
        (mesh is None, "without --mesh", "tokens experts_per_token"),
        (mesh is not None, "with --mesh", "world"),
        ("ep" not in (mesh or {}), "with a --mesh without dimension ep", "experts_per_token"),
        (args.param_dtype == "fp32", "with --param-dtype fp32", "learning_rate"),
    )
    for holds, situation, options in (*shared, *cases):
        for option in options.split() if holds else ():
            if option in args.given:
                name = option.replace("_", "-")
                raise ModelError(f"{situation} leave --{name} out: it has no effect")
    if mesh is not None and args.tokens is None:
        raise ModelError("with --mesh give --tokens")


def _check_ranks(args: argparse.Namespace) -> None:
    """Raise ModelError unless the ranks divide among replicas and hosts."""
    if args.world is None:
        raise ModelError("give --world, the total number of ranks (or --sites, at least 2)")
    if args.world == 1:
        raise ModelError("a single rank sends nothing: give 2 or more")
    if args.world % args.replicas:
        raise ModelError(f"--world {args.world} does not divide by --replicas {args.replicas}")
    if args.world == args.replicas:
        raise ModelError(f"--world {args.world} with as many replicas shards nothing")
    if args.world % args.ranks_per_host:
        raise ModelError(
            f"--world {args.world} does not divide by --ranks-per-host {args.ranks_per_host}"
        )


def _mesh(args: argparse.Namespace) -> dict[str, int] | None:
    """The ranks by dimension, with ``args.world`` set to those that FSDP shards over, and
    ``args.param_dtype`` set."""
    if args.param_dtype is None:
        args.param_dtype = args.dtype if args.ddp else "bf16"
    if args.mesh is None:
        return None
    mesh = parse_mesh(args.mesh)
    args.world = math.prod(mesh.get(name, 1) for name in DATA)
    return mesh


def as_json(data: Any) -> str:
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False)
