"""``python -m benchmarks structure``: the size of the code, and the calls of one reduction.

It prints the lines and files of each room. For each policy it prints the calls, functions and files
of one reduction of a unit: the third after the warm-up, profiled in the first of two processes on
gloo.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tagc.codecs.workspace import Workspace
from tagc.collect import UnitReducer
from tagc.ops import get_ops
from tagc.plan import UnitInfo, UnitParam, build_plan
from tagc.policy import Policy

ROOT = Path(__file__).parents[1]
ROOMS = ("tagc", "triton_kernels", "policies", "tests", "benchmarks", "examples")
RANKS = 2


about = "lines by room, and the calls of one reduction"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See :mod:`.suites`."""
    parser.add_argument("--policies", default="hybrid,attn-only", help="policies of a reduction")
    parser.add_argument("--calls", action="store_true", help="print every call, in order")


def run(args: argparse.Namespace) -> int:
    """Print both tables."""
    print("| room | Python lines | files |\n|---|---|---|")
    for room in ROOMS:
        sizes = [len(path.read_text().splitlines()) for path in (ROOT / room).rglob("*.py")]
        print(f"| `{room}` | {sum(sizes):,} | {len(sizes)} |")
    print(
        "\n| one reduction | calls | functions | files | changes of file |\n|---|---|---|---|---|"
    )
    for policy in args.policies.split(","):
        calls = calls_of(policy)
        files = [place.split(":")[0] for place, _ in calls]
        changes = sum(a != b for a, b in pairwise(files))
        counts = (len(calls), len(set(calls)), len(set(files)), changes)
        print(f"| `{policy}` | " + " | ".join(map(str, counts)) + " |")
        if args.calls:
            print(*(f"    {place} {name}" for place, name in calls), sep="\n")
    return 0


def calls_of(policy: str) -> list[tuple[str, str]]:
    """Calls of the library's own functions, as a place (file and line) and a name."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "calls"
        mp.spawn(_reduce, (policy, folder, found), nprocs=RANKS)  # type: ignore[reportPrivateImportUsage]
        lines = found.read_text().splitlines()
    return [(place, name) for place, name in (line.split(" ", 1) for line in lines)]


def _reduce(rank: int, policy: str, folder: str, found: Path) -> None:
    store = dist.FileStore(str(Path(folder) / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    shapes = {"q_proj": (512, 512), "up_proj": (1024, 512), "norm": (512,)}
    params = tuple(
        UnitParam(
            name=f"layers.0.{name}.weight",
            shape=shape,
            columns=torch.Size(shape).numel() // RANKS,
        )
        for name, shape in shapes.items()
    )
    info = UnitInfo(name="layers.0", params=params, world_size=RANKS, dtype=torch.bfloat16)
    (plan,) = build_plan([info], Policy.load(policy)).units
    cpu = torch.device("cpu")
    reducer = UnitReducer(plan, get_ops(cpu), cpu, Workspace(cpu), seed=0, rank=rank)
    reducer.counters.steps = plan.warmup_steps
    group = dist.group.WORLD
    assert group is not None
    calls: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(str(ROOT / "tagc")):
            place = f"{Path(path).relative_to(ROOT)}:{frame.f_code.co_firstlineno}"
            calls.append(f"{place} {frame.f_code.co_qualname}")

    for step in range(3):
        inp = torch.full((RANKS * plan.columns,), 0.5, dtype=torch.bfloat16)
        out = torch.empty(plan.columns, dtype=torch.bfloat16)
        sys.setprofile(note if step == 2 and rank == 0 else None)
        reducer.reduce(out, inp, group, dist.ReduceOp.AVG)
        sys.setprofile(None)
    if rank == 0:
        found.write_text("\n".join(calls))
    dist.barrier()
    dist.destroy_process_group()
