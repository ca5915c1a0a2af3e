"""``structure``: the size of the code, and the calls of one reduction.

It prints the lines and files of each room, and for each policy the calls, functions and files of
one reduction of a unit: the third after the warm-up, profiled in the first of two ranks on gloo.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from tagc.codecs.workspace import Workspace
from tagc.collect import UnitReducer
from tagc.ops import get_ops
from tagc.plan import UnitInfo, UnitParam, build_plan
from tagc.policy import Policy

from .gloo import on_ranks
from .records import markdown

about = "lines by room, and the calls of one reduction"

ROOT = Path(__file__).parents[1]
ROOMS = ("tagc", "triton_kernels", "policies", "tests", "benchmarks", "examples")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this suite."""
    parser.add_argument("--policies", default="hybrid,attn-only", help="policies of a reduction")
    parser.add_argument("--calls", action="store_true", help="print every call, in order")


def run(args: argparse.Namespace) -> int:
    """Print both tables."""
    sizes = {r: [len(f.read_text().splitlines()) for f in (ROOT / r).rglob("*.py")] for r in ROOMS}
    rooms = ((f"`{room}`", f"{sum(size):,}", len(size)) for room, size in sizes.items())
    print(markdown(("room", "Python lines", "files"), rooms))
    rows = []
    for policy in args.policies.split(","):
        calls = on_ranks(_reduce, 2, policy)[0]
        files = {place.split(":")[0] for place, _ in calls}
        rows.append((f"`{policy}`", len(calls), len(set(calls)), len(files)))
        if args.calls:
            print(*(f"    {place} {name}" for place, name in calls), sep="\n")
    print("\n" + markdown(("one reduction", "calls", "functions", "files"), rows))
    return 0


def _reduce(rank: int, policy: str) -> list[tuple[str, str]]:
    """Calls of the library's own functions, as a place (file and line) and a name."""
    shapes = {"q_proj": (512, 512), "up_proj": (1024, 512), "norm": (512,)}
    params = tuple(
        UnitParam(name=f"layers.0.{n}.weight", shape=s, columns=torch.Size(s).numel() // 2)
        for n, s in shapes.items()
    )
    info = UnitInfo(name="layers.0", params=params, world_size=2, dtype=torch.bfloat16)
    (plan,) = build_plan([info], Policy.load(policy)).units
    cpu = torch.device("cpu")
    reducer = UnitReducer(plan, get_ops(cpu), cpu, Workspace(cpu), seed=0, rank=rank)
    reducer.counters.steps = plan.warmup_steps
    group = dist.group.WORLD
    assert group is not None
    calls: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(str(ROOT / "tagc")):
            place = f"{Path(path).relative_to(ROOT)}:{frame.f_code.co_firstlineno}"
            calls.append((place, frame.f_code.co_qualname))

    for step in range(3):
        inp = torch.full((2 * plan.columns,), 0.5, dtype=torch.bfloat16)
        out = torch.empty(plan.columns, dtype=torch.bfloat16)
        sys.setprofile(note if step == 2 else None)
        reducer.reduce(out, inp, group, dist.ReduceOp.AVG)
        sys.setprofile(None)
    return calls
