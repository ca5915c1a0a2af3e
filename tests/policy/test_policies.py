"""Policies: where they come from, what they extend, how they are shown, what they hash, and which
rule a parameter gets."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch

from support.policy_files import BASE, BIG, load_text, one_rule
from tagc.plan import UnitInfo, UnitParam, build_plan
from tagc.policy import (
    ROLES,
    SMALL,
    ParamInfo,
    Policy,
    PolicyError,
    Tuning,
    first_match,
    policies,
    show,
)

DENSE = {"when": {}, "codec": {"kind": "dense"}}

# Policies that come with the package


@pytest.mark.parametrize("name", policies())
def test_shipped_policies(name: str) -> None:
    """What they are for is said, and what they compress are matrices only."""
    assert policies()[name].endswith(".")
    text = (resources.files("tagc.policies") / f"{name}.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=policy.schema.json\n")
    assert "# When to use" in show(name)
    policy = Policy.load(name)
    for rules, dtype in ((policy.gradients, "float32"), (policy.parameters, "bfloat16")):
        for role in ("norm", "router", "ssm"):
            info = ParamInfo(name="w", shape=BIG, role=role, layer=0, dtype=dtype)
            index = first_match(rules, info)
            assert index is None or rules[index].codec.kind == "dense", role


def test_load_from_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "p.yaml"
    policy = load_text(BASE, tmp_path)
    assert policy.name == str(file)
    assert policy.about == "a test"
    assert Policy.load(str(file)) == policy
    assert Policy.load(policy) is policy
    monkeypatch.chdir(tmp_path)
    assert Policy.load("p.yaml").name == "p.yaml"
    (tmp_path / "attn-only").write_text(BASE)
    assert Policy.load("./attn-only") == policy
    assert Policy.load("attn-only").name == "attn-only"
    data = {"schema": 1, "gradients": [DENSE]}
    assert Policy.load(data).name == "<dict>"
    assert Policy.load(data) == Policy.load("dense")


def test_the_environment_names_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAGC_POLICY", raising=False)
    assert Policy.load().name == "auto"
    monkeypatch.setenv("TAGC_POLICY", "")
    assert Policy.load(None).name == "auto"
    monkeypatch.setenv("TAGC_POLICY", str(write(tmp_path, mine=OWN)))
    assert Policy.load(None).name == str(tmp_path / "mine.yaml")
    assert Policy.load("dense").name == "dense"
    monkeypatch.setenv("TAGC_POLICY", "hybird")
    with pytest.raises(PolicyError, match="TAGC_POLICY=hybird: no built-in policy 'hybird'; did"):
        Policy.load(None)


def test_factors_and_defaults() -> None:
    """Tuning is advice: it is no part of what a policy means. Feedback is what fits the codec."""
    factors = {"rate_factor": 2, "norm_factor": 7}
    assert "2 times the learning rate, and 7 times the clip" in Tuning(**factors).advice
    policy = Policy.load({"schema": 1, "tuning": factors, "gradients": [DENSE]})
    assert policy.tuning == Tuning(**factors)
    assert policy == Policy.load("dense")
    codecs = ({"kind": "dense"}, {"kind": "sketch", "density": 0.1}, {"kind": "quantized"})
    rules = [{"when": {}, "codec": codec} for codec in codecs]
    found = Policy.load({"schema": 1, "gradients": rules}).gradients
    assert [rule.feedback.kind for rule in found] == ["none", "residual", "average"]


def with_roles(roles: dict[str, Any]) -> Policy:
    return Policy.load({"schema": 1, "extends": "attn-only", "roles": roles})


def with_sites(**sites: Any) -> Policy:
    return Policy.load({"schema": 1, "gradients": [DENSE], "sites": sites})


SAME = [
    (with_roles({"mlp": ["b", "a"]}), with_roles({"mlp": ["a", "b", "b"]})),
    (one_rule({"layers": "0 - 4"}), one_rule({"layers": [0, 4]})),
    # Python's order of a set of strings differs from process to process.
    (one_rule({"role": ROLES}), one_rule({"role": ROLES[::-1]})),
    (one_rule({}), one_rule({"role": None}, feedback={"dtype": "float32"})),
    (with_sites(), with_sites(every=32, outer={"rate": 0.7})),
]
DIFFERENT = [
    (with_roles({"mlp": "a", "head": "b"}), with_roles({"head": "b", "mlp": "a"})),
    (one_rule({}), one_rule({"layers": 3})),
    (one_rule({}), one_rule({}, feedback={"dtype": "bfloat16"})),
    (with_sites(), with_sites(outer={"momentum": 0.5})),
    (Policy.load("dense"), Policy.load("dense").with_inside("int8")),
    (Policy.load("hybrid"), Policy.load("hybrid-3d")),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_equal_meaning_gives_equal_hash(one: Policy, other: Policy) -> None:
    assert one.hash == other.hash
    assert one == other
    assert len({one, other}) == 1


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_other_meaning_gives_another_hash(one: Policy, other: Policy) -> None:
    assert one.hash != other.hash
    assert one != other


# Policies that extend others

OWN = """\
schema: 1
extends: hybrid
gradients:
  - when: {role: embedding}
    codec: {kind: dense}
"""


def write(folder: Path, **files: str) -> Path:
    """Files by their stem; the first one's path."""
    for stem, text in files.items():
        (folder / f"{stem}.yaml").write_text(text)
    return folder / f"{next(iter(files))}.yaml"


def test_own_rules_come_first(tmp_path: Path) -> None:
    policy, base = Policy.load(write(tmp_path, mine=OWN)), Policy.load("hybrid")
    assert policy.gradients[1:] == base.gradients
    assert policy.parameters == base.parameters
    assert policy.about == base.about
    assert [policy.inherits("gradients", i) for i in range(2)] == [False, True]
    assert policy.origins("gradients") == (str(tmp_path / "mine.yaml"), "tagc/policies/hybrid.yaml")
    # It is the same policy as one with all rules.
    whole = base.model_dump(mode="json", by_alias=True, exclude_unset=True)
    rule = {"when": {"role": "embedding"}, "codec": {"kind": "dense"}}
    assert policy == Policy.load({**whole, "gradients": [rule, *whole["gradients"]]})
    assert policy == Policy.load({"schema": 1, "extends": "hybrid", "gradients": [rule]})
    assert Policy.load({"schema": 1, "extends": "hybrid"}) == base


@pytest.mark.parametrize(
    ("base", "own", "changed"),
    [
        ("sites", {"about": "x", "sites": {"outer": {"rate": 0.5}}}, {"sites.outer.rate": 0.5}),
        (
            "hybrid-3d",
            {"dimensions": {"tp": {"codec": {"kind": "quantized", "bits": 4}}}},
            {"dimensions.tp.codec.bits": 4},
        ),
        ("hybrid-3d", {"roles": {"head": "x.*"}}, {"roles.head": ["x.*"]}),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_a_section_is_merged_key_by_key(
    base: str, own: dict[str, Any], changed: dict[str, Any], tmp_path: Path
) -> None:
    """One key of a section changes one key, however deep, also if a third file extends that."""
    expected = Policy.load(base).model_dump(mode="json", by_alias=True)
    expected["about"] = own.get("about", expected["about"])
    for path, value in changed.items():
        *outer, key = path.split(".")
        section = expected
        for part in outer:
            section = section[part]
        section[key] = value
    path = write(tmp_path, mine=json.dumps({"schema": 1, "extends": base} | own))
    last = write(tmp_path, last="schema: 1\nextends: mine.yaml\n")
    for policy in (Policy.load(path), Policy.load(last)):
        assert policy.model_dump(mode="json", by_alias=True) == expected
    text = show(path)
    assert Policy.load(write(tmp_path, shown=text)) == Policy.load(path)
    assert "\nextends:" not in text


MINE = "schema: 1\nextends: %s\n"


@pytest.mark.parametrize(
    ("extends", "other", "message"),
    [
        ("hybird", "", "mine.yaml:2:1: extends: no built-in policy 'hybird'; did you mean 'hybrid"),
        ("./b.yaml", "", "mine.yaml:2:1: extends: b.yaml: cannot be read: No such file"),
        (
            "b.yaml",
            "schema: 2\n",
            "mine.yaml:2:1: extends: 'b.yaml' is not a valid policy:\n"
            "b.yaml:1:1: schema: must be 1, the only schema so far, not 2\n"
            "b.yaml:1:1: gradients: the key is missing",
        ),
        (
            "b.yaml",
            MINE % "mine.yaml",
            "b.yaml:2:1: extends: policies extend each other: mine.yaml → b.yaml → mine.yaml",
        ),
        ("a/../../b.yaml", "", "mine.yaml:2:1: extends: 'a/../../b.yaml' is not in the folder of"),
        ("/etc/passwd", "", "mine.yaml:2:1: extends: '/etc/passwd' is not in the folder of"),
    ],
)
def test_the_other_policy_is_wrong(extends: str, other: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, mine=MINE % extends, **({"b": other} if other else {}))
    with pytest.raises(PolicyError) as caught:
        Policy.load(path)
    assert str(caught.value).replace(f"{path.parent}/", "").startswith(message)


def test_only_own_rules_have_to_match(tmp_path: Path) -> None:
    """Those of the other policy may be left without parameters by those that come before."""
    param = UnitParam(name="lm_head.weight", shape=BIG, columns=BIG[0] * BIG[1] // 2)
    unit = UnitInfo(name="", params=(param,), world_size=2, dtype=torch.float32)
    own = "schema: 1\nextends: attn-only\ngradients:\n"
    for role, count in (("head", 0), ("[router]", 1)):
        rules = f"  - {{when: {{role: {role}}}, codec: {{kind: quantized}}}}\n"
        rules += "  - {when: {}, codec: {kind: quantized}}\n"
        plan = build_plan([unit], Policy.load(write(tmp_path, mine=own + rules)))
        assert sum("matches no parameter" in w for w in plan.warnings) == count


@pytest.mark.parametrize(
    ("when", "name", "expected"),
    [
        ({}, "layers.0.mlp.w1.weight", True),
        ({"role": ["head", "mlp"]}, "layers.0.attention.wq.weight", False),
        ({}, "relative_attention_bias.weight", True),
        ({"name": "*.MLP.*"}, "layers.0.mlp.w1.weight", False),
        ({"name": ["head.*", "layers.[01].*"]}, "layers.0.mlp.w1.weight", True),
        ({"name": "layers.0.mlp.*"}, "module.layers.0._orig_mod.mlp.w1.weight", True),
        ({"role": "mlp", "name": "*.w2.*"}, "layers.0.mlp.w1.weight", False),
        ({"layers": "1-2"}, "layers.3.mlp.w1.weight", False),
        ({"layers": 3}, "layers.3.mlp.w1.weight", True),
        ({"layers": "0-99"}, "lm_head.weight", False),
        ({"min_numel": 512 * 512, "max_numel": 512 * 512}, "layers.0.mlp.w1.weight", True),
        ({"max_numel": 512 * 512 - 1}, "layers.0.mlp.w1.weight", False),
        ({"dtype": "float16"}, "layers.0.mlp.w1.weight", True),
        ({"dtype": ["float32", "bfloat16"]}, "layers.0.mlp.w1.weight", False),
    ],
)
def test_conditions(when: dict, name: str, expected: bool):
    index = first_match(one_rule(when).gradients, ParamInfo.of(name, BIG, "float16"))
    assert index == (0 if expected else None)


@pytest.mark.parametrize(
    ("when", "shape", "expected"),
    [
        ({}, (SMALL,), False),
        ({}, (1, SMALL - 1), False),
        ({"min_numel": 8}, (SMALL,), False),
        ({"name": "*"}, (8,), True),
        ({"name": "*", "min_numel": 9}, (8,), False),
    ],
)
def test_small_and_flat_parameters_are_dense_unless_named(when, shape, expected):
    index = first_match(one_rule(when).gradients, ParamInfo.of("layers.0.mlp.w1.weight", shape))
    assert index == (0 if expected else None)


@pytest.mark.parametrize(
    ("name", "named"),
    [("layers.0.mlp.experts.gate_up_proj_bias", "*bias"), ("layers.0.mixer.A_log", "*.A_log")],
)
def test_biases_and_state_space_parameters_are_compressed_only_where_named(name, named):
    """Also biases that are matrices, as those of stacked experts are."""
    info = ParamInfo.of(name, BIG)
    assert first_match(one_rule({"min_numel": 1}).gradients, info) is None
    assert first_match(one_rule({"name": named}).gradients, info) == 0


def test_the_first_matching_rule_wins(tmp_path):
    policy = load_text(BASE, tmp_path)
    assert first_match(policy.gradients, ParamInfo.of("layers.0.attention.wq.weight", BIG)) == 0
    assert first_match(policy.gradients, ParamInfo.of("layers.0.attention.wq.bias", (512,))) == 1
    assert first_match(policy.gradients, ParamInfo.of("layers.0.mlp.w1.weight", BIG)) == 1
