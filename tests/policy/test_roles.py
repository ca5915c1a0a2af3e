"""Roles and layers over the parameter names of the model families that people train."""

import pytest

import tagc
from support.role_names import labelled
from tagc.policy import Policy, role_of
from tagc.policy.roles import clean_name, layer_of

WRAPPERS = ["module.module.", "_orig_mod.module.", "module._fsdp_wrapped_module."]


@pytest.mark.parametrize(
    ("name", "role", "layer"),
    [
        ("layers.2.mlp.layers.0.weight", "mlp", 2),
        ("mlp_head.1.weight", "head", None),
        ("wav2vec2.feature_extractor.conv_layers.0.conv.weight", "embedding", None),
        ("layers.2.mixer.conv1d.weight", "ssm", 2),
        ("model.layers.61.shared_head.head.weight", "head", 61),
        ("encoder.block.3.layer.1.DenseReluDense.wi_0.weight", "mlp", 3),
    ],
)
def test_role_and_layer(name: str, role: str, layer: int | None):
    """`tests/data/role-names.txt` has whole families."""
    assert role_of(name) == role
    assert layer_of(name) == layer


def test_roles_of_most_models_that_people_train():
    params = labelled()
    assert len(params) > 1600
    assert not [(p.family, p.name, p.judged) for p in params if p.misjudged]


GPT = """
    tok.weight                    embedding
    pos.weight                    embedding
    blocks.0.qkv.weight           attention
    blocks.0.proj.weight          attention
    blocks.0.fc.weight            mlp
    blocks.0.fc2.weight           mlp
    blocks.1.attn.qkv.weight      attention
    blocks.1.attn.proj.weight     attention
    blocks.1.fc.weight            mlp
    blocks.1.proj.weight          mlp
    blocks.1.proj.lora_A.weight   mlp
    blocks.2.w.weight             other
    blocks.2.proj.weight          other
    fc.weight                     other
    proj.weight                   other
    head.weight                   head
"""


def test_names_that_only_their_neighbours_explain():
    """A `proj` beside a `qkv` is attention's; in a module with neither, it is nobody's."""
    lines = [line.split() for line in GPT.strip().splitlines()]
    expected = {line[0]: line[1] for line in lines}
    policy = Policy.load("attn-only").for_model(expected)
    assert policy == Policy.load("attn-only")
    assert {name: policy.describe(name, (64, 64)).role for name in expected} == expected
    wrapped = "module.blocks.0._checkpoint_wrapped_module.proj.weight"
    assert policy.describe(wrapped, (64, 64)).role == "attention"
    own = Policy.load({"schema": 1, "extends": "dense", "roles": {"mlp": "blocks.0.*"}})
    assert own.for_model(expected).describe("blocks.0.proj.weight", (64, 64)).role == "mlp"


def test_a_plan_names_what_has_no_role():
    shapes = dict.fromkeys((line.split()[0] for line in GPT.strip().splitlines()), (256, 256))
    text = str(tagc.explain(shapes, "attn-only", world_size=2))
    assert (
        "- 4 matrices have role other, as names tell no more: fc.weight, proj.weight and 2 more"
        in text
    )


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_are_transparent(wrapper: str):
    for inner in ("_checkpoint_wrapped_module", "_fsdp_wrapped_module"):
        wrapped = f"{wrapper}layers.7.{inner}._orig_mod.attention.wq.weight"
        assert clean_name(wrapped) == "layers.7.attention.wq.weight"
        assert role_of(wrapped) == "attention"
        assert layer_of(wrapped) == 7
    assert role_of(f"{wrapper}output.weight") == "head"  # at the top


@pytest.mark.parametrize("name", ["encoder.module.w1.weight", "my_module.w1.weight", "module"])
def test_a_users_own_module_is_kept(name: str):
    assert clean_name(name) == name
