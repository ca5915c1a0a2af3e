"""Which rule a parameter gets."""

import pytest

from support.policy_files import BASE, BIG, load_text, one_rule
from tagc.policy import SMALL, ParamInfo, Policy


@pytest.mark.parametrize(
    ("when", "name", "expected"),
    [
        ({}, "layers.0.mlp.w1.weight", True),
        ({"role": "mlp"}, "layers.0.mlp.w1.weight", True),
        ({"role": "mlp"}, "layers.0.attention.wq.weight", False),
        ({"role": ["head", "mlp"]}, "layers.0.mlp.w1.weight", True),
        ({"name": "*.mlp.*"}, "layers.0.mlp.w1.weight", True),
        ({"name": "*.MLP.*"}, "layers.0.mlp.w1.weight", False),
        ({"name": "mlp"}, "layers.0.mlp.w1.weight", False),
        ({"name": ["head.*", "layers.[01].*"]}, "layers.0.mlp.w1.weight", True),
        ({"name": "layers.0.mlp.*"}, "module.layers.0._orig_mod.mlp.w1.weight", True),
        ({"role": "mlp", "name": "*.w2.*"}, "layers.0.mlp.w1.weight", False),
        ({"layers": "1-2"}, "layers.0.mlp.w1.weight", False),
        ({"layers": "1-2"}, "layers.1.mlp.w1.weight", True),
        ({"layers": [1, 2]}, "layers.2.mlp.w1.weight", True),
        ({"layers": "1-2"}, "layers.3.mlp.w1.weight", False),
        ({"layers": 3}, "layers.3.mlp.w1.weight", True),
        ({"layers": "0-99"}, "lm_head.weight", False),
        ({"min_numel": 512 * 512}, "layers.0.mlp.w1.weight", True),
        ({"min_numel": 512 * 512 + 1}, "layers.0.mlp.w1.weight", False),
        ({"min_numel": 512 * 512, "max_numel": 512 * 512}, "layers.0.mlp.w1.weight", True),
        ({"max_numel": 512 * 512}, "layers.0.mlp.w1.weight", True),
        ({"max_numel": 512 * 512 - 1}, "layers.0.mlp.w1.weight", False),
    ],
)
def test_conditions(when: dict, name: str, expected: bool):
    index = one_rule(when).match(ParamInfo.of(name, BIG))
    assert index == (0 if expected else None)


@pytest.mark.parametrize(
    ("when", "shape", "expected"),
    [
        ({}, (SMALL,), False),
        ({}, (1, SMALL), True),
        ({}, (1, SMALL - 1), False),
        ({"role": "mlp"}, (SMALL * 4,), False),
        ({"min_numel": 8}, (1, 8), True),
        ({"min_numel": 8}, (SMALL,), False),
        ({"name": "*"}, (8,), True),
        ({"name": "*", "min_numel": 9}, (8,), False),
    ],
)
def test_small_and_flat_parameters_are_dense_unless_named(when, shape, expected):
    index = one_rule(when).match(ParamInfo.of("layers.0.mlp.w1.bias", shape))
    assert index == (0 if expected else None)


def test_a_dense_rule_matches_small_parameters_too():
    assert Policy.load("dense").match(ParamInfo.of("norm.weight", (8,))) == 0


def test_the_first_matching_rule_wins(tmp_path):
    policy = load_text(BASE, tmp_path)
    assert policy.match(ParamInfo.of("layers.0.attention.wq.weight", BIG)) == 0
    assert policy.match(ParamInfo.of("layers.0.attention.wq.bias", (512,))) == 1
    assert policy.match(ParamInfo.of("layers.0.mlp.w1.weight", BIG)) == 1
