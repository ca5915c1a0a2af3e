"""The policies that come with the package."""

import pytest

from support.policy_files import BIG
from tagc.policy import ROLES, ParamInfo, Policy, policies

# What a policy compresses, if not every matrix; and the policies that compress gathers as well.
COMPRESSED = {"attn-only": {"attention"}, "dense": set()}
MATRICES = {"attention", "mlp", "embedding", "head", "other"}
GATHERS = {"hybrid", "hybrid-3d", "hosts", "thrifty", "stateless", "auto", "attn-only"}


def test_policies_are_sorted_and_say_what_they_do():
    assert list(policies()) == sorted(policies())
    assert all(about.endswith(".") for about in policies().values())


@pytest.mark.parametrize("name", policies())
def test_what_they_compress(name: str):
    policy = Policy.load(name)
    compressed, gathered = set(), set()
    for role in ROLES:
        info = ParamInfo(name="w", shape=BIG, role=role, layer=0)
        index = policy.match(info)
        if index is not None:
            codec = policy.gradients[index].codec
            if codec.kind != "dense":
                compressed.add(role)
            elif name == "attn-only":
                assert codec.model_dump()["wire"] == "bfloat16"
        if any(rule.when.miss(info) is None for rule in policy.parameters):
            gathered.add(role)
    assert compressed == COMPRESSED.get(name, MATRICES)
    assert gathered == (compressed if name in GATHERS else set())
