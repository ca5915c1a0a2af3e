"""Which rule a parameter gets."""

import pytest

from support.policy_files import BASE, BIG, NO_DENSE, load_text, one_rule
from tagc.policy import SMALL, ParamInfo, Policy, first_match, nearest_miss

DENSE = {"kind": "dense"}


@pytest.mark.parametrize(
    ("when", "name", "expected"),
    [
        ({}, "layers.0.mlp.w1.weight", True),
        ({"role": ["head", "mlp"]}, "layers.0.mlp.w1.weight", True),
        ({"role": ["head", "mlp"]}, "layers.0.attention.wq.weight", False),
        ({"name": "*.mlp.*"}, "layers.0.mlp.w1.weight", True),
        ({"name": "*.MLP.*"}, "layers.0.mlp.w1.weight", False),
        ({"name": ["head.*", "layers.[01].*"]}, "layers.0.mlp.w1.weight", True),
        ({"name": "layers.0.mlp.*"}, "module.layers.0._orig_mod.mlp.w1.weight", True),
        ({"role": "mlp", "name": "*.w2.*"}, "layers.0.mlp.w1.weight", False),
        ({"layers": "1-2"}, "layers.0.mlp.w1.weight", False),
        ({"layers": "1-2"}, "layers.1.mlp.w1.weight", True),
        ({"layers": "1-2"}, "layers.3.mlp.w1.weight", False),
        ({"layers": 3}, "layers.3.mlp.w1.weight", True),
        ({"layers": "0-99"}, "lm_head.weight", False),
        ({"min_numel": 512 * 512 + 1}, "layers.0.mlp.w1.weight", False),
        ({"min_numel": 512 * 512, "max_numel": 512 * 512}, "layers.0.mlp.w1.weight", True),
        ({"max_numel": 512 * 512 - 1}, "layers.0.mlp.w1.weight", False),
    ],
)
def test_conditions(when: dict, name: str, expected: bool):
    index = first_match(one_rule(when).gradients, ParamInfo.of(name, BIG))
    assert index == (0 if expected else None)


@pytest.mark.parametrize(
    ("when", "shape", "expected"),
    [
        ({}, (SMALL,), False),
        ({}, (1, SMALL), True),
        ({}, (1, SMALL - 1), False),
        ({"min_numel": 8}, (1, 8), True),
        ({"min_numel": 8}, (SMALL,), False),
        ({"name": "*"}, (8,), True),
        ({"name": "*", "min_numel": 9}, (8,), False),
    ],
)
def test_small_and_flat_parameters_are_dense_unless_named(when, shape, expected):
    index = first_match(one_rule(when).gradients, ParamInfo.of("layers.0.mlp.w1.weight", shape))
    assert index == (0 if expected else None)


@pytest.mark.parametrize("name", ["mlp.experts.gate_up_proj_bias", "mlp.w1.bias", "bias"])
def test_a_bias_is_no_matrix_even_if_experts_are_stacked(name: str):
    info = ParamInfo.of(f"layers.0.{name}", BIG)
    assert first_match(one_rule({}).gradients, info) is None
    assert first_match(one_rule({"role": ["mlp", "other"], "min_numel": 1}).gradients, info) is None
    assert first_match(one_rule({"name": "*bias"}).gradients, info) == 0
    for other in ("mlp.w1.weight", "relative_attention_bias.weight", "mlp.unbias"):
        assert first_match(one_rule({}).gradients, ParamInfo.of(other, BIG)) == 0


def test_state_space_parameters_are_compressed_only_where_named():
    info = ParamInfo.of("layers.0.mixer.A_log", BIG)
    assert info.role == "ssm"
    assert first_match(one_rule({}).gradients, info) is None
    assert first_match(one_rule({"min_numel": 1}).gradients, info) is None
    assert first_match(one_rule({"role": "ssm"}).gradients, info) == 0
    assert first_match(one_rule({"name": "*.A_log"}).gradients, info) == 0
    vector = ParamInfo.of("layers.0.mixer.D", (SMALL,))
    assert first_match(one_rule({"role": "ssm"}).gradients, vector) is None


@pytest.mark.parametrize(
    ("when", "name", "shape", "why"),
    [
        ({"role": "head"}, "layers.3.mlp.w1.weight", BIG, "no rule for its role"),
        ({"role": "mlp", "name": "x"}, "layers.3.mlp.w1.weight", BIG, "no rule for its name"),
        ({"layers": "0-2"}, "layers.3.mlp.w1.weight", BIG, "no rule for its layer"),
        ({"min_numel": 10**6}, "mlp.w1.weight", BIG, "262,144 elements < min_numel 1,000,000"),
        ({"max_numel": 9}, "mlp.w1.weight", BIG, "262,144 elements > max_numel 9"),
        ({}, "mlp.w1.bias", (SMALL,), "one dimension: no rule names it"),
        ({}, "mlp.experts.down_proj_bias", BIG, "bias: no rule names it"),
        ({}, "mlp.w1.weight", (8, 512), "4,096 elements < 16,384: see min_numel"),
    ],
)
def test_what_keeps_a_rule_from_a_parameter(when: dict, name: str, shape, why: str):
    rules = one_rule(when).gradients
    assert nearest_miss(rules, ParamInfo.of(name, shape)).why == why


def test_the_nearest_rule_says_why():
    rules = [{"when": when, "codec": NO_DENSE} for when in ({"role": "mlp"}, {"role": "head"})]
    policy = Policy.load({"schema": 1, "gradients": [*rules, {"when": {}, "codec": DENSE}]})
    for name in ("mlp.w1.weight", "lm_head.weight"):
        assert "see min_numel" in nearest_miss(policy.gradients, ParamInfo.of(name, (2, 2))).why
    assert nearest_miss(Policy.load("dense").gradients, ParamInfo.of("w", BIG)).why == (
        "no rule compresses"
    )


def test_the_first_matching_rule_wins(tmp_path):
    policy = load_text(BASE, tmp_path)
    assert first_match(policy.gradients, ParamInfo.of("layers.0.attention.wq.weight", BIG)) == 0
    assert first_match(policy.gradients, ParamInfo.of("layers.0.attention.wq.bias", (512,))) == 1
    assert first_match(policy.gradients, ParamInfo.of("layers.0.mlp.w1.weight", BIG)) == 1
