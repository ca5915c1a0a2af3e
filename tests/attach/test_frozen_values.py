"""Frozen parameters that hold what few bits cannot carry: masks, constants, infinities."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import tagc
from support.block_net import wrap
from support.distributed import on_ranks
from support.gathering import INT8, KEPT, gathering

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
MASKS = ("causal", "lowest", "mixed", "binary", "constant")


class Masked(nn.Module):
    """A trained matrix, frozen weights, and frozen masks."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.seen: dict[str, Tensor] = {}
        lowest = torch.finfo(dtype).min
        self.trained = nn.Parameter(torch.randn(9, 40))
        values = {
            "causal": torch.full((9, 40), -math.inf).triu(1),
            "lowest": torch.full((9, 40), lowest).triu(1),
            "mixed": torch.randn(9, 40).index_fill(1, torch.tensor([7]), lowest),
            "binary": torch.ones(9, 40).tril(),
            "constant": torch.full((9, 40), 0.1),
            "weights": torch.randn(9, 40),
        }
        for name, value in values.items():
            setattr(self, name, nn.Parameter(value, requires_grad=False))

    def forward(self, read: Any) -> Tensor:
        return read(self) + self.trained.float().sum()


def wrapped(codec: dict[str, Any], dtype: torch.dtype) -> Any:
    model = Masked(dtype)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    return wrap(model, gathering(codec, "*"))


def read_all(model: Any) -> Tensor:
    """What a forward sees, in an attribute, and a loss."""
    model.seen = {name: p.detach().clone() for name, p in model.named_parameters()}
    return torch.zeros(())


def step(model: Any, optimizer: Any) -> dict[str, Tensor]:
    model(read_all).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model.seen


CASES: tuple[tuple[dict[str, Any], torch.dtype], ...] = (
    (INT8, F32),
    (INT8 | {"bits": 4}, F16),
    (KEPT, BF16),
    ({"kind": "delta", "bits": 4, "block": 32}, BF16),
    ({"kind": "dense", "wire": "bfloat16"}, F32),
    ({"kind": "exact"}, BF16),
    ({"kind": "exact", "keep_copy": False}, BF16),
)
LEFT = {"quantized": {*MASKS}, "dense": {"lowest", "mixed"}, "delta": set(), "exact": set()}


@on_ranks(2)
def test_masks_and_constants_arrive_as_they_are(rank: int, world_size: int) -> None:
    for codec, dtype in CASES:
        exact = {name: p.detach().to(dtype) for name, p in Masked(dtype).named_parameters()}
        model = wrapped(codec, dtype)
        optimizer = torch.optim.SGD([model.trained], lr=0.1)
        compressor = tagc.compressor(model)
        for resumed in (False, True):
            if resumed:
                compressor.load_state_dict(compressor.state_dict())
            seen = step(model, optimizer)
            for name in MASKS:
                if codec["kind"] == "dense" and name in ("binary", "constant"):
                    exact[name] = exact[name].bfloat16().to(dtype)
                assert torch.equal(seen[name], exact[name]), (codec, name, seen[name])
            assert bool(seen["trained"].isfinite().all())
            off = (seen["weights"] - exact["weights"]).abs().max().item()
            assert off == 0 if codec["kind"] in ("delta", "exact") else 0 < off < 0.4
        plan = compressor.plan()
        by_name = {row.param: row.codec for row in plan.rows if row.direction == "parameters"}
        left = {name for name, used in by_name.items() if used == "dense"}
        assert left == LEFT[codec["kind"]], codec
        assert math.isfinite(compressor.metrics().parameter_error)


@on_ranks(2)
def test_only_one_rank_sees_a_mask(rank: int, world_size: int) -> None:
    """Its plan is everybody's."""
    model = Masked(F32)
    with torch.no_grad():
        model.get_parameter("weights")[8, 3] = math.inf
    wrap(fully_shard(model), gathering(INT8, "*"), hosts=None)
    row = next(r for r in tagc.compressor(model).plan().rows if r.param == "weights")
    assert row.codec == "dense"


@on_ranks(2)
def test_masks_that_are_written_later_are_an_error_on_all_ranks(rank: int, world_size: int) -> None:
    for dtype, bad in ((BF16, math.nan), (F16, torch.finfo(F16).min)):
        model = wrapped(INT8, dtype)
        with torch.no_grad():
            local: Any = model.weights.to_local()
            if rank == 1:
                local[0, 0] = bad
        with pytest.raises(RuntimeError, match=r"unit '\(root\)' \(weights\) hold values"):
            model(read_all)
        tagc.compressor(model).remove()
        wrap(model, gathering(INT8, "*"))
        with torch.no_grad():
            model(read_all)
        wanted = torch.tensor(bad).to(dtype).expand(1)
        torch.testing.assert_close(
            model.seen["weights"][5, :1], wanted, rtol=0, atol=0, equal_nan=True
        )


@on_ranks(2)
def test_trained_parameters_that_diverge_are_seen_everywhere(rank: int, world_size: int) -> None:
    """As natively, they are no error: a training loop may look for NaN, and load a checkpoint. The
    largest numbers stay inside the range of their dtype."""
    largest = torch.finfo(F16).max
    for dtype, value in ((F32, math.inf), (F16, -largest)):
        model = wrapped(INT8, dtype)
        with torch.no_grad():
            local: Any = model.trained.to_local()
            if rank == 1 or dtype == F16:
                local.fill_(value)
            model(read_all)
        assert bool(model.seen["weights"].isfinite().all())
        if dtype == F32:
            assert bool(model.seen["trained"].isnan().any())
        else:
            assert torch.equal(model.seen["trained"], torch.full((9, 40), value, dtype=F16))
