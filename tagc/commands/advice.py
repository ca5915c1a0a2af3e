"""``tagc advise``: whether compression pays, for one link, each dimension of a mesh, or sites."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from typing import Any

from tagc.basics.plots import pyplot
from tagc.commands.given import (
    ADVISE,
    DTYPES,
    check_ranks,
    check_tokens,
    mesh_of,
    of_mesh,
    print_json,
    refuse_without_effect,
)
from tagc.costs.advise import report
from tagc.costs.auto import is_automatic
from tagc.costs.candidates import Advisor, Question
from tagc.costs.data import advice_data
from tagc.costs.dimensions import activation_traffic, one_stage
from tagc.costs.link import Link
from tagc.costs.models import load_model
from tagc.costs.placement import (
    DimensionAdvice,
    advice_table,
    advise_dimensions,
    data_ranks,
    link_of,
)
from tagc.costs.plot import check_format, draw
from tagc.costs.shapes import ModelError, ModelShapes
from tagc.costs.site_advice import SiteQuestion, site_costs, site_data, site_report
from tagc.policy import Policy, data_parallel_policies, policies


def advise(args: argparse.Namespace) -> int:
    mesh = mesh_of(args)
    together = 1 if mesh is None else data_ranks(mesh, args.ranks_per_host)
    shared = mesh is not None and together == args.world
    holds = {
        "with --sites": args.sites > 1,
        "with --sites and --overlap": args.sites > 1 and args.overlap is not None,
        "with one rank on each host": args.ranks_per_host == 1,
        "without --replicas": args.replicas == 1,
        "without --device cpu": args.device != "cpu",
        "with --memory-bandwidth": args.memory_bandwidth is not None,
        "without a compute time (--step-time)": (
            (args.step_time, args.tokens_per_rank, args.tflops) == (None, None, None)
        ),
        "with a --mesh whose data-parallel ranks share a host": shared,
    }
    refuse_without_effect(args, ADVISE, of_mesh(args, mesh) | holds)
    check_tokens(args)
    if args.sites > 1:
        return _advise_sites(args)
    plots = None if args.plot is None else _plots(args.plot)
    link = Link(
        bandwidth=args.bandwidth,
        latency=args.latency,
        inside=args.inside_bandwidth,
        ranks_per_host=args.ranks_per_host,
    )
    shapes, dimensions = load_model(args.model if args.params is None else args.params), []
    if mesh is None:
        check_ranks(args)
    else:
        dimensions = _advise_dimensions(args, shapes, mesh, link)
        shapes = one_stage(shapes, mesh)
        lines = advice_table(dimensions, link) if dimensions else []
        if shared:
            if together > 1:
                lines += ["", f"FSDP's {together} ranks share a host: leave its traffic to it."]
            if not args.json:
                print("\n".join(lines))
            return print_json({"dimensions": _plain(dimensions)}) if args.json else 0
        link = link_of(link, together)
        if not args.json:
            print("\n".join([*lines, ""]))
    advisor = _advisor(args, shapes, link)
    if plots is not None:
        try:
            draw(advisor, plots, str(args.plot))
        except OSError as error:
            raise ModelError(f"cannot draw to {args.plot}: {error}") from None
    if args.json:
        return print_json(advice_data(advisor) | {"dimensions": _plain(dimensions)})
    print(report(advisor))
    return 0


def _advise_sites(args: argparse.Namespace) -> int:
    world = args.sites if args.world is None else args.world
    if world % args.sites:
        raise ModelError(f"--world {world} does not divide by --sites {args.sites}")
    shapes = load_model(args.model if args.params is None else args.params)
    question = SiteQuestion(
        shapes=shapes,
        world_size=world,
        sites=args.sites,
        bandwidth=args.bandwidth,
        latency=args.latency,
        compute=_compute(args, shapes),
        overlap=args.overlap if args.overlap is not None else 0.0 if args.device == "cpu" else 1.0,
    )
    loaded = map(Policy.load, [*policies(), *args.policy])
    chosen = [p for p in loaded if not (p.dimensions or is_automatic(p) or p.name == "dense")]
    costs, refused = site_costs(question, chosen)
    if args.json:
        return print_json(site_data(costs, refused))
    print(site_report(question, costs, refused))
    return 0


def _advisor(args: argparse.Namespace, shapes: ModelShapes, link: Link) -> Advisor:
    on_cpu = args.device == "cpu"
    if args.world == link.ranks_per_host:
        raise ModelError(f"--world {args.world} on a single host: nothing crosses its link")
    within = None
    if args.shard_bandwidth is not None:
        within = replace(link, bandwidth=args.shard_bandwidth, ranks_per_host=1)
    question = Question(
        shapes=shapes,
        world_size=args.world,
        replicas=args.replicas,
        link=link,
        shard_link=within,
        compute=_compute(args, shapes),
        overlap=args.overlap if args.overlap is not None else 0.0 if on_cpu else 1.0,
        dtype=DTYPES[args.dtype],
        parameter_dtype=DTYPES[args.param_dtype],
        gloo=on_cpu,
        memory_bandwidth=args.memory_bandwidth,
        ops=args.ops,
        device_memory=args.device_memory,
        micro_batches=args.micro_batches,
        ddp=args.ddp,
    )
    names = [*data_parallel_policies(), *args.policy]
    return Advisor(question, [Policy.load(name) for name in names])


def _advise_dimensions(
    args: argparse.Namespace, shapes: ModelShapes, mesh: dict[str, int], link: Link
) -> list[DimensionAdvice]:
    traffic = activation_traffic(
        shapes,
        Policy.load("hybrid-3d"),
        mesh,
        tokens=args.tokens,
        itemsize=DTYPES[args.param_dtype].itemsize,
        experts_per_token=args.experts_per_token,
        micro_batches=args.micro_batches,
    )
    return advise_dimensions(traffic, mesh, link, memory_bandwidth=args.memory_bandwidth)


def _plain(dimensions: list[DimensionAdvice]) -> list[dict[str, Any]]:
    return [asdict(each) | {"pays": each.pays} for each in dimensions]


def _plots(file: str) -> Any:
    """matplotlib's pyplot; raises before anything takes time."""
    found = pyplot()
    try:
        check_format(found, file)
    except ValueError as error:
        raise ModelError(f"cannot draw to {file}: {error}") from None
    return found


def _compute(args: argparse.Namespace, shapes: ModelShapes) -> float | None:
    given = args.tokens_per_rank, args.tflops
    if args.step_time is not None:
        if given != (None, None):
            raise ModelError("give --step-time, or --tokens-per-rank and --tflops, not both")
        return args.step_time
    if given == (None, None):
        return None
    tokens = args.tokens if args.tokens_per_rank is None else args.tokens_per_rank
    if tokens is None or args.tflops is None:
        raise ModelError("--tokens-per-rank and --tflops belong together: give both")
    # Two operations per parameter and token in forward, four in backward.
    return 6 * shapes.numel * tokens / (args.tflops * 1e12)
