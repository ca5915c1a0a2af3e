"""What ``explain`` and ``advise`` share: ranks, meshes and dtypes as given, and JSON."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

import torch

from tagc.costs.dimensions import DATA, parse_mesh
from tagc.costs.shapes import ModelError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


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


def check_ddp(args: argparse.Namespace, *others: str) -> None:
    """Raise ModelError if ``--ddp`` comes with options for sharded models, ``others`` among them;
    set the dtype of parameters."""
    if args.ddp:
        options = ["replicas", "sites", "mesh", "param_dtype", *others]
        for option in [o for o in options if getattr(args, o) not in (None, 1)]:
            raise ModelError(f"with --ddp leave --{option.replace('_', '-')} out")
    if args.param_dtype is None:
        args.param_dtype = args.dtype if args.ddp else "bf16"


def mesh_of(args: argparse.Namespace) -> dict[str, int] | None:
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


def print_json(data: Any) -> int:
    """Print, and return the exit status 0."""
    print(json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False))
    return 0
