"""Where parameters lie in FSDP's buffers, and what a plan makes of FSDP1's."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from tagc.costs.link import traffic
from tagc.plan import FlatBuffer, UnitInfo, UnitParam, UnitPlan, build_plan, bytes_in_step
from tagc.plan.param_slices import ParamSlice, columns_of, param_slices
from tagc.plan.programs import sends_in_step
from tagc.policy import Policy


def flat(world_size: int, whole: bool = True, **sizes: int) -> UnitInfo:
    """Vectors end to end, and padding."""
    params, start = [], 0
    for name, numel in sizes.items():
        params.append(UnitParam(name=name, shape=(numel,), columns=0, start=start))
        start += numel
    buffer = FlatBuffer(columns=math.ceil(start / world_size), whole=whole)
    return UnitInfo(
        name="unit", params=tuple(params), world_size=world_size, dtype=torch.float32, flat=buffer
    )


def chosen(info: UnitInfo, names: str) -> list[UnitParam]:
    return [param for param in info.params if param.name in names]


def test_the_example_of_the_docstring() -> None:
    info = flat(2, a=4, b=3, c=2)
    assert columns_of(info, chosen(info, "ac")) == 4
    assert list(param_slices(info, chosen(info, "ac"))) == [
        ParamSlice(param="a", offset=0, length=4, row=0, column=0, start=0),
        ParamSlice(param="c", offset=0, length=2, row=1, column=0, start=2),
    ]
    assert columns_of(info, chosen(info, "b")) == 2
    assert list(param_slices(info, chosen(info, "b"))) == [
        ParamSlice(param="b", offset=0, length=1, row=0, column=0, start=4),
        ParamSlice(param="b", offset=1, length=2, row=1, column=0, start=0),
    ]


def block_plan() -> UnitPlan:
    """A block whose first and last quarter are quantized, the others dense, on 4 ranks."""
    sizes = {"attn.wq": 400, "attn.bias": 10, "norm.weight": 390, "mlp.fc1": 800}
    info = flat(4, True, **sizes)
    codec = {"kind": "quantized", "bits": 8, "block": 32}
    rule = {"when": {"name": ["attn.wq", "mlp.fc1"]}, "codec": codec}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = build_plan([info], Policy.load({"schema": 1, "gradients": [rule]}))
    return plan.units[0]


def test_only_what_an_owner_has_is_sent() -> None:
    unit = block_plan()
    (send, _), *_ = sends_in_step(unit)
    assert send.columns is not None
    on_average = sum(map(send.bytes_of, range(4))) / 4
    assert traffic(unit).all_to_all == on_average < send.bytes_for(send.inp.numel)
    quantized = unit.compressed[0].codec.words
    room = -(-quantized // 4) * 4
    spans = [(span.start, span.stop) for span in unit.messages.sent or ()]
    # Rows: all of wq; bias and norm; half of fc1 each.
    assert spans == [(0, quantized), (room, room + 400), (0, quantized), (0, quantized)]
    words = [unit.messages.words_of(segment) for segment in unit.segments]
    assert words == [3 * quantized / 4, 100]
    sent = sum(bytes_in_step(unit))
    assert sent == pytest.approx(4 * 3 / 4 * (3 * quantized + 400))
    shares = [unit.dense_columns(segment.params) for segment in unit.segments]
    assert shares == [300, 100]
