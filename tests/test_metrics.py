"""What `metrics()` prints, and hands to loggers."""

from __future__ import annotations

import json
from typing import Any

import pytest

import tagc
from support.distributed import on_ranks
from support.small_net import loss_of
from support.states import wrapped

ADVICE = "use 3 times the learning rate, and 5 times the clipping threshold of your uncompressed"
POLICY = {
    "schema": 1,
    "tuning": {"rate_factor": 3, "norm_factor": 5},
    "gradients": [
        {
            "when": {"name": ["first*weight", "second*weight"]},
            "codec": {"kind": "sketch", "density": 0.3, "symbol": "int8x4", "warmup_steps": 2},
            "feedback": {"kind": "residual"},
        }
    ],
}


@on_ranks(2)
@pytest.mark.parametrize("more", [{}, {"parameters": [{"when": {}, "codec": {"kind": "dense"}}]}])
def test_metrics_say_what_still_warms_up_and_how_much_less_is_sent(
    rank: int, world_size: int, more: dict[str, Any]
) -> None:
    model = wrapped(POLICY | more)
    compressor = tagc.compressor(model)
    for left in (2, 1, 0, 0):
        text = str(compressor.metrics())
        assert (f"warming up: {left} more reductions" in text) == (left > 0)
        loss_of(model, rank, left).backward()
    metrics = compressor.metrics()
    assert json.loads(json.dumps(metrics.as_dict()))["wire_bytes"] == metrics.wire_bytes
    assert (metrics.rate_factor, metrics.norm_factor) == (3, 5)
    wire, dense = compressor.plan().sent["parameters"]
    assert metrics.native_parameter_bytes == 4 * wire == 4 * dense > 0
    assert metrics.total_wire_bytes == metrics.wire_bytes + metrics.native_parameter_bytes
    assert metrics.total_dense_bytes == metrics.dense_bytes + metrics.native_parameter_bytes
    _, gradients, _, parameters, together, density, residual, advice = str(metrics).splitlines()
    # FSDP sends the parameters itself, so together it is less than for gradients.
    assert (parameters.split()[0], parameters.split()[-1]) == ("parameters", "1.00x")
    ratios = [float(line.split()[-1].rstrip("x")) for line in (gradients, together)]
    assert ratios[0] > ratios[1] > 1
    assert "of 30.0% asked for" in density
    assert residual.startswith("residual norm ")
    assert advice.startswith(ADVICE)
