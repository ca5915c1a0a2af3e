"""``tagc advise`` and ``tagc explain``: what a policy would do and take, before anything runs."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from typing import Any

import torch

from tagc.costs.advise import Advisor, Question, report
from tagc.costs.auto import FastestChoice, is_automatic
from tagc.costs.codec_time import no_time
from tagc.costs.explain import plan_shapes
from tagc.costs.link import Link
from tagc.costs.quantities import bandwidth, count, memory, number, seconds, share
from tagc.costs.shapes import ModelError, ModelShapes, load_model
from tagc.policy import Policy, policies

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_MODEL = (
    "a number of parameters, for a synthetic transformer (7e9); module:function, which returns an "
    "nn.Module; or a JSON file of shapes by name"
)


def add_commands(commands: Any) -> None:
    """Add both subcommands; each sets ``run``, a function of the parsed arguments."""
    command = commands.add_parser("explain", help="show what a policy does to a model")
    command.set_defaults(run=_explain)
    command.add_argument("model", metavar="MODEL", help=_MODEL)
    command.add_argument("--policy", default="hybrid", help="a built-in name or a YAML file")
    _add_ranks(command)
    command.add_argument("--bandwidth", type=bandwidth, help="for codec auto, such as 10Gbit")
    command.add_argument("--latency", type=seconds, default=0.0, help="for codec auto")
    command.add_argument(
        "--full", action="store_true", help="a line for each parameter, also of equal blocks"
    )

    command = commands.add_parser("advise", help="predict whether compression pays")
    command.set_defaults(run=_advise)
    what = command.add_mutually_exclusive_group(required=True)
    what.add_argument("--params", help="parameters of a synthetic transformer, such as 7e9")
    what.add_argument("--model", help=_MODEL)
    _add_ranks(command)
    command.add_argument(
        "--bandwidth",
        type=bandwidth,
        required=True,
        help="what a host sends to the others, such as 10Gbit or 1.25GB",
    )
    command.add_argument(
        "--latency", type=seconds, default=0.0, help="of one collective, such as 50us"
    )
    command.add_argument(
        "--inside-bandwidth",
        type=bandwidth,
        default=math.inf,
        help="what a rank sends to those of its own host, such as 450GB; default: not counted",
    )
    command.add_argument(
        "--shard-bandwidth", type=bandwidth, help="within a replica, if that is faster"
    )
    command.add_argument(
        "--step-time", type=seconds, help="compute of a step, communication not counted"
    )
    command.add_argument("--tokens-per-rank", type=count, help="per step; with --tflops")
    command.add_argument(
        "--tflops", type=number, help="that a rank reaches in practice; with --tokens-per-rank"
    )
    command.add_argument(
        "--overlap",
        type=share,
        help="share of the communication that compute can hide; default: 0 on cpu, else 1",
    )
    command.add_argument(
        "--device",
        choices=("cpu", "gpu"),
        default="gpu",
        help="cpu: gloo, codecs are measured here; gpu: NCCL",
    )
    command.add_argument(
        "--memory-bandwidth",
        type=bandwidth,
        help="of the device, such as 3TB, for a lower bound of codec time",
    )
    command.add_argument(
        "--device-memory",
        type=memory,
        help="of a rank, less what activations take, such as 80GB: what does not fit is said so",
    )
    command.add_argument(
        "--micro-batches", type=count, default=1, help="backwards for each step of the optimizer"
    )
    command.add_argument("--ops", help="implementation that is measured on cpu")
    command.add_argument(
        "--policy", nargs="+", default=[], metavar="FILE", help="policies beside those that ship"
    )


def _add_ranks(command: argparse.ArgumentParser) -> None:
    command.add_argument("--world", type=count, required=True, help="ranks in all")
    command.add_argument(
        "--replicas", type=count, default=1, help="copies of the sharded model among them"
    )
    command.add_argument(
        "--ranks-per-host", type=count, default=1, help="ranks that share a host and its card"
    )
    command.add_argument(
        "--dtype", choices=_DTYPES, default="fp32", help="of the gradients that FSDP reduces"
    )
    command.add_argument(
        "--param-dtype", choices=_DTYPES, default="bf16", help="of the parameters that it gathers"
    )


def _check_ranks(args: argparse.Namespace) -> None:
    if args.world % args.replicas:
        raise ModelError(f"--world {args.world} does not divide by --replicas {args.replicas}")
    if args.world == args.replicas:
        raise ModelError(f"--world {args.world} of as many replicas shards nothing")
    if args.world % args.ranks_per_host:
        raise ModelError(
            f"--world {args.world} is not a number of hosts with --ranks-per-host "
            f"{args.ranks_per_host}"
        )


def _explain(args: argparse.Namespace) -> int:
    _check_ranks(args)
    shapes, policy = load_model(args.model), Policy.load(args.policy)
    choose = None
    if args.bandwidth is not None:
        per_host = args.ranks_per_host
        link = Link(bandwidth=args.bandwidth, latency=args.latency, ranks_per_host=per_host)
        note = "chosen by the bandwidth that was given; codec time is not included"
        choose = FastestChoice(lambda position, direction: link, no_time, (note,))
    elif is_automatic(policy):
        raise ModelError(f"policy {policy.name!r} chooses by the link: give --bandwidth")
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
    print(f"{shapes.numel:,} parameters, {len(shapes.blocks)} blocks, {args.world} ranks")
    print(plan.full if args.full else plan)
    return 0


def _advise(args: argparse.Namespace) -> int:
    _check_ranks(args)
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
    names = [*policies(), *args.policy]
    print(report(Advisor(question, [Policy.load(name) for name in names])))
    return 0


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
    # Two operations per parameter and token forwards, four backwards.
    return 6 * shapes.numel * args.tokens_per_rank / (args.tflops * 1e12)
