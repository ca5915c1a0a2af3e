"""What `metrics()` prints, and hands to loggers."""

from __future__ import annotations

import json
import warnings

import tagc
from support.distributed import run_ranks
from support.small_net import loss_of, sharded

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


def printed(rank: int) -> list[str]:
    model = sharded()
    with warnings.catch_warnings():
        # Such small units pay with no codec.
        warnings.simplefilter("ignore", UserWarning)
        tagc.wrap(model, POLICY)
    compressor = tagc.compressor(model)
    assert compressor is not None
    texts = []
    for step in range(4):
        texts.append(str(compressor.metrics()))
        loss_of(model, rank, step).backward()
    metrics = compressor.metrics()
    assert json.loads(json.dumps(metrics.as_dict()))["wire_bytes"] == metrics.wire_bytes
    assert (metrics.rate_factor, metrics.norm_factor) == (3, 5)
    wire, dense = compressor.plan().sent["parameters"]
    assert metrics.native_parameter_bytes == 4 * wire == 4 * dense > 0
    assert metrics.total_wire_bytes == metrics.wire_bytes + metrics.native_parameter_bytes
    assert metrics.total_dense_bytes == metrics.dense_bytes + metrics.native_parameter_bytes
    return [*texts, str(metrics)]


def test_metrics_say_what_still_warms_up_and_how_much_less_is_sent():
    for texts in run_ranks(printed, 2):
        assert "warming up: 2 more reductions go dense" in texts[0]
        assert "warming up: 1 more reductions" in texts[1]
        assert not any("warming up" in text for text in texts[2:])
        head, gradients, compressed, parameters, together, density, *rest = texts[-1].splitlines()
        residual, advice = rest
        assert head.split() == ["steps", "4", "sent", "dense", "ratio"]
        assert gradients.split()[0] == "gradients"
        # Two of four steps were dense.
        assert compressed.startswith("- compressed")
        assert compressed.endswith("x")
        # FSDP sends the parameters itself, so together it is less than for gradients.
        assert (parameters.split()[0], parameters.split()[-1]) == ("parameters", "1.00x")
        assert together.split()[0] == "together"
        ratios = [float(line.split()[-1].rstrip("x")) for line in (gradients, together)]
        assert ratios[0] > ratios[1] > 1
        assert density.startswith("density ")
        assert "of 30.0% asked for" in density
        assert residual.startswith("residual norm ")
        assert advice.startswith(ADVICE)
