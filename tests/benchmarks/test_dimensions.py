"""Models split over several dimensions: equal to the whole one, and as many bytes as planned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks.dimensions import training
from benchmarks.dimensions.model import Net, Size
from benchmarks.dimensions.training import STARVED, Job, Trainer, policy_of
from support.distributed import on_ranks
from tagc.costs.dimensions import activation_traffic
from tagc.costs.shapes import ModelShapes
from tagc.groups.mesh import bytes_by_dimension
from tagc.policy import Policy

SIZE = Size(width=64, layers=2, heads=2)


@on_ranks(2, timeout=120)
@pytest.mark.parametrize("dimension", ["tp", "pp"])
def test_losses_and_bytes(rank: int, world_size: int, dimension: str) -> None:
    losses = []
    # Meshes of the same names are equal for torch, so the other is that of another dimension.
    for method, layout in (("8 bits", {dimension: 2}), ("dense", {"dp": 2})):
        trainer = Trainer(Job(layout=layout, method=method, steps=1, size=SIZE))
        before = bytes_by_dimension().get(dimension)
        trainer.step()
        if method == "8 bits":
            after = bytes_by_dimension()[dimension]
            wire = after.wire_bytes - (0 if before is None else before.wire_bytes)
            sent = torch.tensor([wire], dtype=torch.float64)
            torch.distributed.all_reduce(sent, torch.distributed.ReduceOp.MAX)
            check_bytes(sent.item(), layout)
        with patch.object(training, "_WINDOWS", 64):
            losses.append(trainer.validate())
    assert losses[0] == pytest.approx(losses[1], rel=0.003)


SMALL_STARVED = replace(STARVED, layers=1)


@on_ranks(4, timeout=120)
def test_experts_under_fsdp_have_the_gradients_of_experts_alone(rank: int, world_size: int) -> None:
    found = []
    for layout in ({"dp": 2, "ep": 2}, {"ep": 4}):
        trainer = Trainer(Job(layout=layout, method="dense", steps=1, size=SMALL_STARVED))
        optimizer: Any = torch.optim.SGD(trainer.net.parameters(), lr=0.0)
        optimizer.zero_grad = lambda: None
        trainer.optimizer = optimizer
        trainer.step()
        found.append(trainer.weights(gradients=True))
        (shares,) = trainer.shares()
        assert sum(shares) == pytest.approx(1, abs=1e-4)
        assert shares[0] > 0.3 > 0.02 > shares[-1]
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], rtol=1e-4, atol=1e-6, msg=name)


def test_methods() -> None:
    for method, kind in (("exact", "exact"), ("4 bits, stochastic", "quantized")):
        policy = Policy.load(policy_of(method))
        assert {rule.codec.kind for rule in policy.dimensions.values()} == {kind}
    assert policy_of("hybrid-3d") == "hybrid-3d"


def check_bytes(sent: float, layout: dict[str, int]) -> None:
    """Within 1% of the plan."""
    policy: Any = policy_of("8 bits")
    shapes = {name: tuple(p.shape) for name, p in Net(SIZE).named_parameters()}
    (planned,) = activation_traffic(
        ModelShapes.of(shapes), Policy.load(policy), layout, tokens=32 * 64, itemsize=4
    )
    assert sent == pytest.approx(planned.wire_bytes, rel=0.01), (sent, planned)
