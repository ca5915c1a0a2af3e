"""A rehearsal calls the operators that a step calls, and compiles all that a step launches."""

from __future__ import annotations

import math
import warnings
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tagc
from support.compiled import compiling
from support.distributed import run_ranks
from support.launching import Echo
from support.marks import slow
from support.small_net import loss_of, sharded
from tagc.codecs.workspace import Workspace
from tagc.collect import GatherSetup, MessageGatherer, UnitReducer, rehearse
from tagc.collect.gatherer import Phase
from tagc.collect.transport import SilentGroup, SilentTransport
from tagc.ops import Ops, compiles_ahead, get_ops, reference
from tagc.plan import UnitInfo, UnitParam, build_plan
from tagc.selfcheck import Call, Recorder
from tagc.selfcheck.calls import OPERATORS

WEIGHTS = {"name": ["first*weight", "second*weight", "head.weight"]}
RESIDUAL = {"kind": "residual"}
RULES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]] = {
    "quantized": (
        {"kind": "quantized", "bits": 4, "block": 32},
        RESIDUAL,
        {"kind": "quantized", "bits": 8},
    ),
    "dithered": (
        {"kind": "quantized", "bits": 4, "block": 32, "rounding": "stochastic"},
        {"kind": "none"},
        {"kind": "delta", "bits": 4, "rounding": "stochastic"},
    ),
    "average": ({"kind": "quantized", "bits": 4}, {"kind": "average"}, None),
    "matrix": ({"kind": "matrix", "bits": 1}, RESIDUAL, {"kind": "delta", "bits": 2}),
    "groups": ({"kind": "matrix", "group": 8}, RESIDUAL | {"dtype": "bfloat16"}, None),
    "sketch": ({"kind": "sketch", "density": 0.3, "symbol": "int8x4"}, RESIDUAL, None),
    "shared sketch": (
        {"kind": "sketch", "density": 0.9, "symbol": "int8x4", "support": "shared"},
        RESIDUAL,
        None,
    ),
    "delta": ({"kind": "quantized", "bits": 4}, RESIDUAL, {"kind": "delta", "bits": 4}),
}


def policy(name: str) -> dict[str, Any]:
    gradients, feedback, parameters = RULES[name]
    rules = [{"when": WEIGHTS, "codec": gradients, "feedback": feedback}]
    made: dict[str, Any] = {"schema": 1, "gradients": rules}
    if parameters is not None:
        made["parameters"] = [{"when": WEIGHTS, "codec": parameters}]
    return made


def idle() -> Ops:
    """Operators that do nothing; some return something."""

    def peel(cells: Tensor, index: Tensor, seed: Tensor, *, layout: Any) -> tuple[Tensor, Tensor]:
        symbols = cells.new_empty(layout.groups)
        return symbols, symbols.bool()

    def nothing(name: str) -> Any:
        given = getattr(get_ops("cpu", "reference"), name)

        def idles(*args: Any, **kwargs: Any) -> None: ...

        idles.__wrapped__ = given  # for its signature
        return idles

    operators = {name: nothing(name) for name in OPERATORS} | {"peel": peel}
    prepare = dict.fromkeys(
        (name for name in reference.__all__ if name.startswith("prepare")),
        lambda *sizes, **options: None,
    )
    return cast(Ops, SimpleNamespace(**operators, **prepare))


def called(rank: int, policy: Any, hosts: int | None = None) -> tuple[set[Call], set[Call]]:
    """In three steps of training, and in the rehearsal of their plan."""
    model = sharded()
    recorder = Recorder(get_ops("cpu", "reference"))
    with pytest.MonkeyPatch.context() as patch:
        for module in ("collectives", "readiness"):
            patch.setattr(f"tagc.handle.{module}.get_ops", lambda device, name=None: recorder)
        with warnings.catch_warnings():
            # Such small segments pay with no codec.
            warnings.simplefilter("ignore", UserWarning)
            tagc.wrap(model, policy, hosts=hosts)
    recorder.calls.clear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3):
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = set(recorder.calls)
    rehearsed = Recorder(idle())
    compressor = tagc.compressor(model)
    assert compressor is not None
    rehearse(compressor.plan(), rehearsed.ops)
    dist.barrier()
    return trained, set(rehearsed.calls)


@pytest.mark.some(4)
@pytest.mark.parametrize("name", RULES)
def test_a_rehearsal_calls_what_training_calls(name):
    for trained, rehearsed in run_ranks(called, 2, policy(name)):
        assert len(trained) >= 2
        assert trained == rehearsed


def test_a_rehearsal_calls_what_ranks_of_a_host_call():
    inside = policy("quantized") | {"inside": "int8"}
    for trained, rehearsed in run_ranks(called, 4, inside, 2):
        assert {call.operator for call in trained} >= {"quantize", "dequantize"}
        assert trained == rehearsed


def launched(step: Any) -> set[tuple[str, str]]:
    """Kernels that a step would launch, as they are compiled."""
    with compiling(90) as found:
        step()
    return {(k.name, k.ptx) for k in found}


@pytest.mark.parametrize("name", ["groups", slow("sketch")])
def test_what_a_rehearsal_compiles_is_all_that_a_step_launches(name):
    """Kernels differ by what is aligned: rows and messages of all segments lie as they will."""
    gradients, feedback, _ = RULES[name]
    shapes = {"first.weight": (32, 64), "bias": (32,), "second.weight": (16, 64)}
    params = tuple(
        UnitParam(name=param, shape=shape, columns=math.prod(shape) // 2)
        for param, shape in shapes.items()
    )
    info = UnitInfo(name="unit", world_size=2, dtype=torch.bfloat16, params=params)
    rule = {"when": WEIGHTS, "codec": gradients, "feedback": feedback}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        plan = build_plan([info], tagc.Policy.load({"schema": 1, "gradients": [rule]}))
    (unit,) = plan.units
    ops = get_ops("cuda", "triton")
    cpu = torch.device("cpu")
    reducer = UnitReducer(unit, ops, cpu, Workspace(cpu), seed=0, connect=Echo)
    grad, out = (torch.empty(n * unit.columns, dtype=torch.bfloat16) for n in (2, 1))
    ranks: Any = SilentGroup(2)

    assert compiles_ahead(ops)

    def rehearsal() -> None:
        with ops.compiling_only():
            rehearse(plan, ops)

    def step() -> None:
        for _ in range(2):  # the first one steers no thresholds
            reducer.reduce(out, grad, ranks, dist.ReduceOp.AVG)

    compiled = launched(rehearsal)
    assert compiled == launched(step)
    assert len(compiled) >= 5


def test_a_rehearsal_compiles_the_gathers_of_every_rank():
    """Of ranks with odd numbers, too, whose rows of FSDP's output are not aligned here."""
    params = [
        UnitParam(name=name, shape=(2 * columns, 1), columns=columns)
        for name, columns in (("first.weight", 2048), ("bias", 1))
    ]
    info = UnitInfo(name="unit", world_size=2, dtype=torch.bfloat16, params=tuple(params))
    plan = build_plan([], tagc.Policy.load(policy("quantized")), gathers=[info])
    ops, cpu, (unit,) = get_ops("cuda", "triton"), torch.device("cpu"), plan.parameters
    assert compiles_ahead(ops)

    def rehearsal() -> None:
        with ops.compiling_only():
            rehearse(plan, ops)

    def gather(rank: int) -> None:
        setup = GatherSetup(
            plan=unit, ops=ops, device=cpu, workspace=Workspace(cpu), connect=SilentTransport
        )
        group: Any = SilentGroup(2)
        out = torch.empty(2, unit.columns, dtype=torch.bfloat16)
        MessageGatherer(setup).gather(out.view(-1), out[rank], group, Phase.FORWARD)

    def variants(step: Any) -> set[int]:
        # Also of those that differ in what Triton knows of alignment, but not in what they do.
        with compiling(90) as found:
            step()
        return {id(kernel) for kernel in found}

    compiled, ranks = variants(rehearsal), [variants(lambda r=r: gather(r)) for r in range(2)]
    assert ranks[0] != ranks[1]
    assert ranks[0] | ranks[1] == compiled
