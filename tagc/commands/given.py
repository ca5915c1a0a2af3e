"""What ``explain`` and ``advise`` share: ranks, meshes and dtypes as given, which options have no
effect beside others, and JSON."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from typing import Any

import torch

from tagc.costs.dimensions import DATA, parse_mesh
from tagc.costs.shapes import ModelError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# The options without effect, by situation.
_SHARED: dict[str, tuple[str, ...]] = {
    "with --ddp": ("replicas", "sites", "mesh", "param_dtype"),
    "without --mesh": ("tokens", "experts_per_token"),
    "with --mesh": ("world",),
    "with a --mesh without dimension ep": ("experts_per_token",),
}
EXPLAIN = _SHARED | {
    "with a policy for sites": (
        *("ddp", "replicas", "ranks_per_host", "dtype", "param_dtype"),
        *("bandwidth", "latency", "micro_batches"),
    ),
    "with a policy that is not for sites": ("sites",),
    "with a policy without codec auto": ("bandwidth", "latency"),
    "with one data-parallel rank": (
        *("replicas", "ranks_per_host", "dtype", "bandwidth", "latency", "micro_batches"),
    ),
    "with one data-parallel rank and without --json": ("full",),
}
ADVISE = _SHARED | {
    "with --ddp": (*_SHARED["with --ddp"], "shard_bandwidth"),
    "with --mesh": ("world", "replicas"),
    "with --sites": (
        *("mesh", "tokens", "experts_per_token", "replicas", "ranks_per_host", "micro_batches"),
        *("dtype", "param_dtype", "inside_bandwidth", "shard_bandwidth", "memory_bandwidth"),
        *("device_memory", "ops", "plot"),
    ),
    "with --sites and --overlap": ("device",),  # which decides only how much overlaps
    "with one rank on each host": ("inside_bandwidth",),
    "without --replicas": ("shard_bandwidth",),
    "without --device cpu": ("ops",),
    "with --memory-bandwidth": ("ops",),
    "without a compute time (--step-time)": ("overlap",),
    "with a --mesh whose data-parallel ranks share a host": (
        *("step_time", "tokens_per_rank", "tflops", "overlap", "device", "ops", "dtype"),
        *("policy", "device_memory", "plot"),
    ),
}


def refuse_without_effect(
    args: argparse.Namespace, table: Mapping[str, tuple[str, ...]], holds: Mapping[str, bool]
) -> None:
    """Raise ModelError if an option was given that has no effect.

    Args:
        table: the options without effect, by situation.
        holds: the situations of this command line.
    """
    assert holds.keys() == table.keys()
    for situation in (situation for situation in table if holds[situation]):
        for option in (option for option in table[situation] if option in args.given):
            said = option.replace("_", "-")
            raise ModelError(f"{situation} leave --{said} out: it has no effect")


def check_tokens(args: argparse.Namespace) -> None:
    """Raise ModelError if a mesh was given without tokens."""
    if args.mesh is not None and args.tokens is None:
        raise ModelError("with --mesh give --tokens")


def of_mesh(args: argparse.Namespace, mesh: dict[str, int] | None) -> dict[str, bool]:
    """Which of the situations that both commands know hold."""
    return {
        "with --ddp": args.ddp,
        "without --mesh": mesh is None,
        "with --mesh": mesh is not None,
        "with a --mesh without dimension ep": mesh is not None and "ep" not in mesh,
    }


def check_ranks(args: argparse.Namespace) -> None:
    """Raise ModelError unless the ranks divide among replicas and hosts."""
    if args.world is None:
        raise ModelError("give --world, the total number of ranks")
    if args.ddp and args.world == 1:
        raise ModelError("--world 1 with --ddp sends nothing")
    if args.world % args.replicas:
        raise ModelError(f"--world {args.world} does not divide by --replicas {args.replicas}")
    if args.world == args.replicas:
        raise ModelError(f"--world {args.world} with as many replicas shards nothing")
    if args.world % args.ranks_per_host:
        raise ModelError(
            f"--world {args.world} does not divide by --ranks-per-host {args.ranks_per_host}"
        )


def mesh_of(args: argparse.Namespace) -> dict[str, int] | None:
    """The ranks by dimension, with ``args.world`` set to those that FSDP shards over, and
    ``args.param_dtype`` set."""
    if args.param_dtype is None:
        args.param_dtype = args.dtype if args.ddp else "bf16"
    if args.mesh is None:
        return None
    try:
        mesh = parse_mesh(args.mesh)
    except ValueError as error:
        raise ModelError(str(error)) from None
    args.world = math.prod(mesh.get(name, 1) for name in DATA)
    return mesh


def print_json(data: Any) -> int:
    """Print, and return the exit status 0."""
    print(json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False))
    return 0
