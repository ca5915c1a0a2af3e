"""What codecs send and add up, for fixed inputs.

The words of every segment are hashed by themselves: how a message arranges them is no codec's
matter, and may change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from golden.inputs import content, digest, fixed
from support.distributed import run_ranks
from support.host_reducers import host_reducer, in_two_levels
from support.units import codec_plan, matrix_plan, reduce, unit_reducer
from tagc.codecs import in_message_order
from tagc.collect import CollectiveWork, UnitReducer, replay
from tagc.ops import get_ops
from tagc.ops.program import Launch, Place, Send
from tagc.plan import Direction, UnitPlan, build_plan
from tagc.policy import Policy

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RANKS = (2, 3, 4)
STEPS = 3
CPU = torch.device("cpu")

NONE, RESIDUAL = {"kind": "none"}, {"kind": "residual"}
BFLOAT16 = RESIDUAL | {"dtype": "bfloat16"}
AVERAGE = {"kind": "average", "beta": 0.75, "reset_steps": 2, "dtype": "bfloat16"}
LEAD, MEASURED = RESIDUAL | {"lead": 0.5}, BFLOAT16 | {"lead": "measured"}
SKETCH = {"kind": "sketch", "density": 0.2}
QUANTIZED, MATRIX, DELTA = ({"kind": kind} for kind in ("quantized", "matrix", "delta"))
SHARED, CHANCE = {"support": "shared"}, {"rounding": "stochastic"}

Case = tuple[dict[str, Any], dict[str, Any] | None]
GRADIENTS: dict[str, Case] = {
    "dense bfloat16": ({"kind": "dense", "wire": "bfloat16"}, None),
    "sketch int8x4 lead": (SKETCH | {"symbol": "int8x4"}, LEAD),
    "sketch int16x2": (SKETCH | {"symbol": "int16x2"}, BFLOAT16),
    "sketch int32x1 none": (SKETCH | {"symbol": "int32x1"}, NONE),
    "sketch shared": (SKETCH | SHARED, RESIDUAL),
    "sketch everything": (SKETCH | {"density": 1.0}, RESIDUAL),
    "quantized 4 average": (QUANTIZED, AVERAGE),
    "quantized 4 chance": (QUANTIZED | {"block": 32} | CHANCE, NONE),
    "quantized 8": (QUANTIZED | {"bits": 8}, BFLOAT16),
    "matrix 1 lead": (MATRIX | {"level": 1.3}, BFLOAT16 | {"lead": 0.83}),
    "matrix 2": (MATRIX | {"bits": 2}, BFLOAT16),
    "matrix groups of 8 measured": (MATRIX | {"group": 8}, MEASURED),
}
# Three replicas or more take two shots by these.
REPLICAS = (
    "dense bfloat16",
    "quantized 4 average",
    "quantized 4 chance",
    "matrix 2",
)
PARAMETERS: dict[str, dict[str, Any]] = {
    "quantized 4": QUANTIZED | {"bits": 4},
    "quantized 8": QUANTIZED | {"bits": 8},
    "delta 2": DELTA | {"bits": 2},
    "delta 4": DELTA,
    "delta 4 chance": DELTA | CHANCE,
    "delta 8": DELTA | {"bits": 8, "block": 64},
    "dense bfloat16": {"kind": "dense", "wire": "bfloat16"},
}
INSIDE = ("native", "bfloat16", "int8")


def hashes(ranks: int, dtype: torch.dtype) -> dict[str, str]:
    """SHA-256 by case: of words, and of sums with what is owed in the end."""
    found: dict[str, str] = {}
    for ranks_sent in zip(*run_ranks(_of_rank, ranks, dtype, timeout=220), strict=True):
        (name,) = {case for case, _, _ in ranks_sent}
        found[name] = " ".join(digest(one[part] for one in ranks_sent) for part in (1, 2))
    return found


def _of_rank(rank: int, dtype: torch.dtype) -> list[tuple[str, bytes, bytes]]:
    """Of every case the name, what this rank sends, and what it gets."""
    ranks = torch.distributed.get_world_size()
    end = f"{str(dtype).removeprefix('torch.')} | {ranks} ranks"
    found = []
    for name, case in GRADIENTS.items():
        reducer = unit_reducer(_plan(ranks, dtype, case))
        found.append((f"gradients | {name} | {end}", *_reduced(reducer, rank)))
    for name in REPLICAS:
        reducer = unit_reducer(_plan(ranks, dtype, GRADIENTS[name], "replicas"))
        found.append((f"replicas | {name} | {end}", *_reduced(reducer, rank)))
    for inside in INSIDE if ranks == 4 else ():
        plan = codec_plan(ranks, QUANTIZED, RESIDUAL, dtype)
        with host_reducer(rank, in_two_levels(plan, QUANTIZED, inside=inside)) as reducer:
            found.append((f"hosts | {inside} inside | {end}", *_reduced(reducer, rank)))
    for name, codec in PARAMETERS.items():
        found.append((f"parameters | {name} | {end}", *_gathered(ranks, dtype, codec)))
    return found


def _plan(
    ranks: int, dtype: torch.dtype, case: Case, direction: Direction = "gradients"
) -> UnitPlan:
    codec, feedback = case
    make = matrix_plan if codec["kind"] == "matrix" or codec.get("bits") == 2 else codec_plan
    return make(ranks, codec, feedback, dtype, direction)


def _reduced(reducer: UnitReducer, rank: int) -> tuple[bytes, bytes]:
    """What a rank sends in the steps of a reducer; what it gets, and what it owes in the end."""
    plan, got = reducer.plan, []
    rows = 1 if plan.direction == "replicas" else plan.info.world_size
    with sending(reducer) as sent:
        for step in range(STEPS):
            inp = fixed((rows, plan.columns), rank, step, dtype=plan.info.dtype)
            got.append(reduce(reducer, inp))
    owed = (reducer.residuals, reducer.owner_residuals, reducer.owner_states)
    got += [tensor for found in owed for _, tensor in sorted(found.items())]
    return b"".join(sent), b"".join(map(content, got))


@contextmanager
def sending(reducer: UnitReducer) -> Iterator[list[bytes]]:
    """The words of every segment that a rank encodes, and the cells of sketches."""
    sent: list[bytes] = []
    programs, shots = reducer.programs, reducer.plan.shots
    spans = {"messages": programs.messages.spans}
    if shots is not None:
        spans["sums_of_slices"] = shots.gather.spans
    starts = {kind: _spied(start, spans, sent) for kind, start in replay._START.items()}
    ops = get_ops(CPU, "reference")
    sketch = ops.encode

    def encode(*args: Any, **kwargs: Any) -> None:
        sketch(*args, **kwargs)
        sent.append(content(args[6]))

    with patch.object(ops, "encode", encode), patch.dict(replay._START, starts):
        yield sent


def _spied(
    start: Callable[..., CollectiveWork], spans: dict[str, Any], sent: list[bytes]
) -> Callable[..., CollectiveWork]:
    def spied(transport: Any, step: Send, out: Tensor, inp: Tensor, scratch: Any) -> Any:
        sent.extend(content(inp[:, span.words]) for span in spans.get(step.flight, ()))
        return start(transport, step, out, inp, scratch)

    return spied


def _gathered(ranks: int, dtype: torch.dtype, config: dict[str, Any]) -> tuple[bytes, bytes]:
    """The messages of all ranks about their shards, or about changes of them, and what they say."""
    info = matrix_plan(ranks, MATRIX, dtype=dtype).info
    rules = {"when": {"name": ["a.*", "c*"]}, "codec": config}
    dense = {"when": {}, "codec": {"kind": "dense"}}
    policy = Policy.load({"schema": 1, "gradients": [dense], "parameters": [rules]})
    (unit,) = build_plan([info], policy, gathers=[info]).parameters
    rows = fixed((ranks, unit.columns), 1000, dtype=torch.float32 if unit.keeps_copy else dtype)
    # Changes are added to rows, and minus zero changes no sum.
    words, got = [], torch.full_like(rows, -0.0 if unit.keeps_copy else torch.nan)
    x, decoded = (Place(name, (*rows.shape,), rows.dtype) for name in ("rows", "decoded"))
    for segment in chain.from_iterable(in_message_order(unit.segments)):
        columns = slice(segment.start, segment.stop)
        message = Place("message", (ranks, segment.codec.words), torch.int32)
        tensors = {"rows": rows, "decoded": got}
        _run(segment.codec.encoding(x[columns], message), tensors)
        _run(segment.codec.decoding(message, decoded[columns]), tensors)
        words.append(content(tensors["message"]))
    return b"".join(words), content(got)


def _run(launches: Iterator[Launch], tensors: dict[str, Tensor]) -> None:
    """Launch the reference's operators. Missing tensors are made."""
    for launch in launches:
        given: list[Tensor | None] = []
        for i, place in enumerate(launch.places):
            if place is None:
                given.append(None)
                continue
            whole = tensors.setdefault(place.name, torch.empty(place.shape, dtype=place.dtype))
            given.append(launch.operator.adapted(i, whole[place.index(0)]))
        launch.operator.bound(get_ops(CPU, "reference"), 0)(*given)
