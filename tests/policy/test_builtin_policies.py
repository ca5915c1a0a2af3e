"""The policies that come with the package."""

import pytest

from support.policy_files import BIG
from tagc.policy import ROLES, ParamInfo, Policy, policies

# Built-in policies

COMPRESSED = {
    "attn-only": {"attention"},
    "dense": set(),
}
MATRICES = {"attention", "mlp", "embedding", "head", "other"}
EVERY_MATRIX = {
    "loco-4bit": "quantized",
    "hybrid": "quantized",
    "hybrid-3d": "quantized",
    "two-bit": "matrix",
    "one-bit": "matrix",
    "half-bit": "matrix",
    "hosts": "quantized",
    "sites": "matrix",
    "sites-thin": "matrix",
    "stateless": "quantized",
    "thrifty": "matrix",
    "auto": "auto",
}


def test_policies_are_sorted_and_say_what_they_do():
    assert list(policies()) == sorted([*COMPRESSED, *EVERY_MATRIX])
    assert all(about.endswith(".") for about in policies().values())


@pytest.mark.parametrize("name", COMPRESSED)
def test_builtin_compresses_its_roles(name: str):
    policy = Policy.load(name)
    compressed = set()
    for role in ROLES:
        index = policy.match(ParamInfo(name="w", shape=BIG, role=role, layer=0))
        if index is None or not policy.gradients[index].codec.compresses:
            continue
        rule = policy.gradients[index].model_dump()
        if rule["codec"]["kind"] == "dense":
            assert rule["codec"]["wire"] == "bfloat16"
        else:
            compressed.add(role)
            assert rule["codec"] == {
                "kind": "sketch",
                "density": 0.44,
                "symbol": "auto",
                "support": "shared",
                "warmup_steps": 40,
            }
            assert rule["feedback"]["kind"] == "residual"
            assert rule["feedback"]["dtype"] == "float32"
    assert compressed == COMPRESSED[name]
    gathered = {
        role
        for role in ROLES
        for rule in policy.parameters
        if rule.when.miss(ParamInfo(name="w", shape=BIG, role=role, layer=0)) is None
    }
    assert gathered == compressed


@pytest.mark.parametrize(("name", "kind"), EVERY_MATRIX.items())
def test_builtin_takes_every_matrix(name: str, kind: str):
    policy = Policy.load(name)
    for role in ROLES:
        index = policy.match(ParamInfo(name="w", shape=BIG, role=role, layer=0))
        if role in MATRICES:
            assert index is not None
            assert policy.gradients[index].codec.kind == kind
        else:
            assert index is None
    gathered = ("hybrid", "hybrid-3d", "hosts", "thrifty", "stateless", "auto")
    assert bool(policy.parameters) == (name in gathered)
    changes = {"hosts": 4, "thrifty": 2}
    if name in changes:
        (codec,) = (rule.codec.model_dump() for rule in policy.parameters)
        assert {"kind": "delta", "bits": changes[name], "block": 256}.items() <= codec.items()
    if name == "hybrid":
        assert [rule.codec.model_dump() for rule in policy.parameters] == [
            {"kind": "quantized", "bits": 8, "block": 256, "keep_for_backward": True}
        ]
