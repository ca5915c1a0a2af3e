"""Policies: where they are loaded from, what is the default, and what their hash says."""

import re

import pytest

from support.policy_files import BASE, load_text, one_rule
from tagc.codecs.dense import DenseConfig
from tagc.codecs.feedback import FeedbackConfig
from tagc.policy import ROLES, Policy

# Sources


def test_load_from_every_source(tmp_path, monkeypatch):
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
    data = {"schema": 1, "gradients": [{"when": {}, "codec": {"kind": "dense"}}]}
    assert Policy.load(data).name == "<dict>"
    assert Policy.load(data) == Policy.load("dense")


def test_the_content_of_a_file(tmp_path):
    first, second = load_text(BASE, tmp_path).gradients
    assert first.when.role == ("attention",)
    assert first.codec.model_dump() == {
        "kind": "sketch",
        "density": 0.2,
        "symbol": "int8x4",
        "support": "own",
        "warmup_steps": 0,
    }
    assert first.feedback == FeedbackConfig(kind="residual", dtype="bfloat16")
    assert second.codec == DenseConfig()


@pytest.mark.parametrize(
    ("codec", "kind"),
    [
        ({"kind": "dense"}, "none"),
        ({"kind": "dense", "wire": "bfloat16"}, "none"),
        ({"kind": "sketch", "density": 0.1}, "residual"),
        ({"kind": "quantized"}, "average"),
        ({"kind": "auto"}, "average"),
    ],
)
def test_feedback_that_fits_is_the_default(codec: dict, kind: str):
    policy = Policy.load({"schema": 1, "gradients": [{"when": {}, "codec": codec}]})
    assert policy.gradients[0].feedback.kind == kind


def with_roles(roles: dict) -> Policy:
    return Policy.load({"schema": 1, "extends": "attn-only", "roles": roles})


SAME = [
    (with_roles({"mlp": ["b", "a"]}), with_roles({"mlp": ["a", "b", "b"]})),
    (one_rule({"layers": "0 - 4"}), one_rule({"layers": [0, 4]})),
    (one_rule({"role": ["mlp", "head"]}), one_rule({"role": ["head", "mlp"]})),
    (one_rule({"name": ["a", "b"]}), one_rule({"name": ("b", "a")})),
    (one_rule({}), one_rule({"role": None}, feedback={"dtype": "float32"})),
]
DIFFERENT = [
    (with_roles({"mlp": "a"}), Policy.load("attn-only")),
    (with_roles({"mlp": "a", "head": "b"}), with_roles({"head": "b", "mlp": "a"})),
    (one_rule({}), one_rule({"layers": 3})),
    (one_rule({}), one_rule({"min_numel": 0})),
    (one_rule({}), one_rule({}, feedback={"dtype": "bfloat16"})),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_equal_meaning_gives_equal_hash(one: Policy, other: Policy):
    assert one.hash == other.hash
    assert one == other
    assert len({one, other}) == 1


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_other_meaning_gives_another_hash(one: Policy, other: Policy):
    assert one.hash != other.hash
    assert one != other


def test_alternatives_have_one_order():
    # Python's order of a set of strings differs from process to process.
    assert one_rule({"role": ROLES[::-1]}).gradients[0].when.role == tuple(sorted(ROLES))


def test_about_and_source_are_not_hashed(tmp_path):
    changed = load_text(BASE.replace("a test", "another"), tmp_path)
    assert re.fullmatch("[0-9a-f]{64}", changed.hash)
    assert changed.hash == load_text(BASE, tmp_path).hash


def test_the_order_of_rules_is_hashed(tmp_path):
    policy = load_text(BASE, tmp_path)
    assert policy.hash != policy.model_copy(update={"gradients": policy.gradients[::-1]}).hash
