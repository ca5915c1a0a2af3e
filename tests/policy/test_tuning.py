"""Factors that a policy names: what they say, where they are said, and what they do not change."""

import pytest

from support.policy_files import one_rule
from tagc.policy import Policy, Tuning

OR = (
    " of your uncompressed run; or keep both, with compressor.keep_rates(optimizer) and "
    "compressor.clip_grad_norm_"
)


def with_tuning(**factors: object) -> dict[str, object]:
    rule = {"when": {"role": "mlp"}, "codec": {"kind": "quantized", "bits": 4}}
    return {"schema": 1, "tuning": factors, "gradients": [rule]}


@pytest.mark.parametrize(
    ("factors", "said"),
    [
        ({}, "keep the learning rate of your uncompressed run"),
        (
            {"norm_factor": 1},
            "keep the learning rate and clipping threshold of your uncompressed run",
        ),
        ({"rate_factor": 1.5}, f"use 1.5 times the learning rate{OR}"),
        (
            {"rate_factor": 2, "norm_factor": 7},
            f"use 2 times the learning rate, and 7 times the clipping threshold{OR}",
        ),
    ],
)
def test_what_is_said_of_them(factors: dict[str, float], said: str):
    assert Tuning(**factors).advice == said
    assert Policy.load(with_tuning(**factors)).tuning == Tuning(**factors)


def test_they_change_nothing_that_ranks_must_agree_on():
    one, other = (Policy.load(with_tuning(rate_factor=f)) for f in (1, 2))
    assert one.hash == other.hash
    assert one_rule({}).tuning is None
