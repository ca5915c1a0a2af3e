"""Policies that extend others, how they are shown, and the policy that the environment names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from support.policy_files import BIG
from tagc.plan import UnitInfo, UnitParam, build_plan
from tagc.policy import ParamInfo, Policy, PolicyError, policies, show

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


def refused(path: Path) -> str:
    with pytest.raises(PolicyError) as caught:
        Policy.load(path)
    return str(caught.value).replace(f"{path.parent}/", "")


def test_own_rules_come_first(tmp_path: Path):
    policy, base = Policy.load(write(tmp_path, mine=OWN)), Policy.load("hybrid")
    assert policy.gradients[1:] == base.gradients
    assert policy.parameters == base.parameters
    assert policy.about == base.about
    assert policy.match(ParamInfo.of("embed_tokens.weight", BIG)) == 0
    assert policy.match(ParamInfo.of("lm_head.weight", BIG)) == 1
    assert [policy.inherits("gradients", i) for i in range(2)] == [False, True]
    assert policy.origins("gradients") == (str(tmp_path / "mine.yaml"), "tagc/policies/hybrid.yaml")


def test_it_is_the_same_policy_as_one_with_all_rules(tmp_path: Path):
    base = Policy.load("hybrid").model_dump(mode="json", by_alias=True, exclude_unset=True)
    rule = {"when": {"role": "embedding"}, "codec": {"kind": "dense"}}
    whole = Policy.load({**base, "gradients": [rule, *base["gradients"]]})
    assert Policy.load(write(tmp_path, mine=OWN)) == whole
    assert Policy.load({"schema": 1, "extends": "hybrid", "gradients": [rule]}) == whole
    assert Policy.load({"schema": 1, "extends": "hybrid"}) == Policy.load("hybrid")


def test_other_keys_and_roles_override(tmp_path: Path):
    first = "schema: 1\nextends: ./second.yaml\nabout: first\nroles: {mlp: a.*, head: b.*}\n"
    second = "schema: 1\nextends: dense\nabout: second\nroles: {head: c.*, norm: [a.*, d.*]}\n"
    policy = Policy.load(write(tmp_path, first=first, second=second))
    assert policy.about == "first"
    assert list(policy.roles.items()) == [
        ("mlp", ("a.*",)),
        ("head", ("b.*",)),
        ("norm", ("a.*", "d.*")),
    ]


@pytest.mark.parametrize(
    ("base", "own", "changed"),
    [
        ("sites", {"sites": {"outer": {"rate": 0.5}}}, {"sites.outer.rate": 0.5}),
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
):
    """One key of a section changes one key, however deep, also if a third file extends that."""
    expected = Policy.load(base).model_dump(mode="json", by_alias=True)
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
    assert Policy.load(write(tmp_path, shown=show(path))) == Policy.load(path)


def test_paths_begin_at_the_folder_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "teams" / "one").mkdir(parents=True)
    write(tmp_path / "teams" / "one", base=OWN)
    mine = write(tmp_path / "teams", mine="schema: 1\nextends: one/base.yaml\n")
    for folder in (tmp_path, mine.parent):
        monkeypatch.chdir(folder)
        assert Policy.load(mine) == Policy.load(tmp_path / "teams" / "one" / "base.yaml")
    (mine.parent / "hybrid").write_text("schema: 1\nextends: ./hybrid\n")
    assert "extend each other" in refused(mine.parent / "hybrid")


def test_what_is_wrong_with_the_other_policy_is_said_with_both_places(tmp_path: Path):
    mine = "schema: 1\nextends: %s\n"
    assert refused(write(tmp_path, mine=mine % "hybird")).startswith(
        "mine.yaml:2:1: extends: no built-in policy 'hybird'; did you mean 'hybrid'?"
    )
    assert refused(write(tmp_path, mine=mine % "./b.yaml")) == (
        "mine.yaml:2:1: extends: b.yaml: cannot be read: No such file or directory"
    )
    assert refused(write(tmp_path, mine=mine % "b.yaml", b="schema: 2\n")) == (
        "mine.yaml:2:1: extends: 'b.yaml' is not a valid policy:\n"
        "b.yaml:1:1: schema: must be 1, the only schema so far, not 2\n"
        "b.yaml:1:1: gradients: the key is missing"
    )
    assert refused(write(tmp_path, mine=mine % "b.yaml", b=mine % "mine.yaml")) == (
        "b.yaml:2:1: extends: policies extend each other: mine.yaml → b.yaml → mine.yaml"
    )


def test_only_own_rules_have_to_match(tmp_path: Path):
    """Those of the other policy may be left without parameters by those that come before."""
    param = UnitParam(name="lm_head.weight", shape=BIG, columns=BIG[0] * BIG[1] // 2)
    unit = UnitInfo(name="", params=(param,), world_size=2, dtype=torch.float32)
    own = "schema: 1\nextends: attn-only\ngradients:\n"
    for role, count in (("head", 0), ("[router]", 1)):
        rules = f"  - {{when: {{role: {role}}}, codec: {{kind: quantized}}}}\n"
        rules += "  - {when: {}, codec: {kind: quantized}}\n"
        plan = build_plan([unit], Policy.load(write(tmp_path, mine=own + rules)))
        assert sum("matches no parameter" in w for w in plan.warnings) == count


@pytest.mark.parametrize("name", policies())
def test_a_built_in_policy_is_shown_as_it_is(name: str, tmp_path: Path):
    assert Policy.load(write(tmp_path, shown=show(name))) == Policy.load(name)
    assert "# When to use" in show(name)


def test_what_extends_is_shown_as_one(tmp_path: Path):
    mine = OWN.replace(
        "when: {role", 'when: {name: ["*.a", "1e-3", "ä", "true"], layers: 2-5, role'
    )
    mine += "roles: {head: x.*}\nabout: 'null'\n"
    mine += "replicas:\n  - {when: {}, codec: {kind: sketch, density: 1e-7}}\n"
    path = write(tmp_path, mine=mine)
    text = show(path)
    assert Policy.load(write(tmp_path, shown=text)) == Policy.load(path)
    assert Policy.load(write(tmp_path, shown=text)).about == "null"
    assert "\nextends:" not in text
    assert text.index(f"# {path}\n  - when:") < text.index("# tagc/policies/hybrid.yaml\n  - when:")


def test_the_environment_names_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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
