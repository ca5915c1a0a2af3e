"""Roles and layers over the parameter names of the model families that people train."""

import pytest

import tagc
from support.role_names import judged, labelled, misjudged
from tagc.policy import ROLES, ParamInfo, Policy, role_of, roles
from tagc.policy.roles import clean_name, layer_of

# family -> lines of "name role layer"; a dash is no layer.
NAMES = {
    "gpt2": """
        transformer.wte.weight                                      embedding -
        transformer.wpe.weight                                      embedding -
        transformer.h.0.ln_1.weight                                 norm 0
        transformer.h.0.attn.c_attn.weight                          attention 0
        transformer.h.0.attn.c_attn.bias                            attention 0
        transformer.h.11.attn.c_proj.weight                         attention 11
        transformer.h.11.ln_2.bias                                  norm 11
        transformer.h.11.mlp.c_fc.weight                            mlp 11
        transformer.h.11.mlp.c_proj.weight                          mlp 11
        transformer.ln_f.weight                                     norm -
        lm_head.weight                                              head -
        h.3.attn.c_attn.weight                                      attention 3
        wte.weight                                                  embedding -
    """,
    "llama, qwen, mistral": """
        model.embed_tokens.weight                                   embedding -
        model.layers.0.self_attn.q_proj.weight                      attention 0
        model.layers.0.self_attn.q_proj.bias                        attention 0
        model.layers.0.self_attn.o_proj.weight                      attention 0
        model.layers.0.self_attn.q_norm.weight                      norm 0
        model.layers.0.self_attn.k_norm.weight                      norm 0
        model.layers.31.mlp.gate_proj.weight                        mlp 31
        model.layers.31.mlp.up_proj.weight                          mlp 31
        model.layers.31.mlp.down_proj.weight                        mlp 31
        model.layers.31.input_layernorm.weight                      norm 31
        model.layers.31.post_attention_layernorm.weight             norm 31
        model.layers.31.post_feedforward_layernorm.weight           norm 31
        model.norm.weight                                           norm -
        lm_head.weight                                              head -
        model.layers.2.self_attn.qkv_proj.weight                    attention 2
        model.layers.2.mlp.gate_up_proj.weight                      mlp 2
    """,
    "mixtral": """
        model.layers.1.block_sparse_moe.gate.weight                 router 1
        model.layers.1.block_sparse_moe.experts.7.w1.weight         mlp 1
        model.layers.1.block_sparse_moe.experts.7.w2.weight         mlp 1
    """,
    "qwen-moe, deepseek, gpt-oss": """
        model.layers.4.mlp.gate.weight                              router 4
        model.layers.4.mlp.gate_proj.weight                         mlp 4
        model.layers.4.mlp.gate.e_score_correction_bias             router 4
        model.layers.4.mlp.experts.63.gate_proj.weight              mlp 4
        model.layers.4.mlp.experts.gate_up_proj                     mlp 4
        model.layers.4.mlp.experts.gate_up_proj_bias                mlp 4
        model.layers.4.mlp.shared_expert.down_proj.weight           mlp 4
        model.layers.4.mlp.shared_experts.up_proj.weight            mlp 4
        model.layers.4.mlp.shared_expert_gate.weight                router 4
        model.layers.4.mlp.router.weight                            router 4
        model.layers.4.self_attn.q_a_proj.weight                    attention 4
        model.layers.4.self_attn.kv_a_proj_with_mqa.weight          attention 4
        model.layers.4.self_attn.kv_a_layernorm.weight              norm 4
        model.layers.4.self_attn.sinks                              attention 4
        model.layers.4.self_attn.gate.weight                        attention 4
        model.layers.61.shared_head.head.weight                     head 61
    """,
    "gpt-neox": """
        gpt_neox.embed_in.weight                                    embedding -
        gpt_neox.layers.5.attention.query_key_value.weight          attention 5
        gpt_neox.layers.5.attention.dense.bias                      attention 5
        gpt_neox.layers.5.mlp.dense_h_to_4h.weight                  mlp 5
        gpt_neox.layers.5.mlp.dense_4h_to_h.weight                  mlp 5
        gpt_neox.layers.5.post_attention_layernorm.weight           norm 5
        gpt_neox.final_layer_norm.weight                            norm -
        embed_out.weight                                            head -
    """,
    "opt": """
        model.decoder.embed_tokens.weight                           embedding -
        model.decoder.embed_positions.weight                        embedding -
        model.decoder.layers.9.self_attn.k_proj.weight              attention 9
        model.decoder.layers.9.self_attn.out_proj.weight            attention 9
        model.decoder.layers.9.self_attn_layer_norm.weight          norm 9
        model.decoder.layers.9.fc1.weight                           mlp 9
        model.decoder.layers.9.fc2.bias                             mlp 9
        model.decoder.layers.9.final_layer_norm.weight              norm 9
        model.decoder.project_in.weight                             other -
    """,
    "falcon, bloom": """
        transformer.word_embeddings.weight                          embedding -
        transformer.word_embeddings_layernorm.weight                norm -
        transformer.h.2.self_attention.query_key_value.weight       attention 2
        transformer.h.2.self_attention.dense.weight                 attention 2
        transformer.h.2.ln_attn.weight                              norm 2
        transformer.h.2.ln_mlp.weight                               norm 2
        transformer.h.2.mlp.dense_h_to_4h.weight                    mlp 2
    """,
    "t5": """
        shared.weight                                               embedding -
        encoder.embed_tokens.weight                                 embedding -
        encoder.block.3.layer.0.SelfAttention.q.weight              attention 3
        encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight embedding 0
        decoder.block.3.layer.1.EncDecAttention.o.weight            attention 3
        decoder.block.3.layer.1.layer_norm.weight                   norm 3
        encoder.block.3.layer.1.DenseReluDense.wi.weight            mlp 3
        encoder.block.3.layer.1.DenseReluDense.wi_0.weight          mlp 3
        decoder.block.3.layer.2.DenseReluDense.wo.weight            mlp 3
        encoder.final_layer_norm.weight                             norm -
        lm_head.weight                                              head -
    """,
    "bert": """
        bert.embeddings.word_embeddings.weight                      embedding -
        bert.embeddings.position_embeddings.weight                  embedding -
        bert.embeddings.token_type_embeddings.weight                embedding -
        bert.embeddings.LayerNorm.weight                            norm -
        bert.encoder.layer.6.attention.self.query.weight            attention 6
        bert.encoder.layer.6.attention.self.value.bias              attention 6
        bert.encoder.layer.6.attention.output.dense.weight          attention 6
        bert.encoder.layer.6.attention.output.LayerNorm.weight      norm 6
        bert.encoder.layer.6.intermediate.dense.weight              mlp 6
        bert.encoder.layer.6.output.dense.weight                    mlp 6
        bert.encoder.layer.6.output.LayerNorm.bias                  norm 6
        bert.pooler.dense.weight                                    head -
        cls.predictions.transform.dense.weight                      head -
        cls.predictions.transform.LayerNorm.weight                  norm -
        cls.predictions.decoder.weight                              head -
        classifier.weight                                           head -
    """,
    "torch.nn.Transformer": """
        layers.0.self_attn.in_proj_weight                           attention 0
        layers.0.self_attn.in_proj_bias                             attention 0
        layers.0.self_attn.out_proj.weight                          attention 0
        encoder.layers.1.linear1.weight                             mlp 1
        encoder.layers.1.linear2.bias                               mlp 1
        decoder.layers.1.multihead_attn.in_proj_weight              attention 1
        decoder.layers.1.norm1.weight                               norm 1
        decoder.layers.1.norm3.bias                                 norm 1
        encoder.norm.weight                                         norm -
    """,
    "torchtitan": """
        tok_embeddings.weight                                       embedding -
        layers.0.attention.wq.weight                                attention 0
        layers.0.attention.wo.weight                                attention 0
        layers.0.attention.q_norm.weight                            norm 0
        layers.0.feed_forward.w1.weight                             mlp 0
        layers.0.feed_forward.w3.weight                             mlp 0
        layers.0.attention_norm.weight                              norm 0
        layers.0.ffn_norm.weight                                    norm 0
        layers.0.moe.router.gate.weight                             router 0
        layers.0.moe.experts.w1                                     mlp 0
        layers.0.moe.shared_experts.w2.weight                       mlp 0
        norm.weight                                                 norm -
        output.weight                                               head -
    """,
    "outside of the families": """
        layers.2.mlp.layers.0.weight                                mlp 2
        blocks.1.norm1.linear.weight                                other 1
        mlp_head.1.weight                                           head -
        blocks.0.att.key.weight                                     attention 0
        conv.weight                                                 other -
        weight                                                      other -
        blocks.0.mixer.proj.weight                                  other 0
        final_layer.adaLN_modulation.1.weight                       other -
        input_ff_layer.output_layer.weight                          other -
        context_embedder.refiner_blocks.0.ff.net.2.weight           mlp 0
        wav2vec2.feature_extractor.conv_layers.0.conv.weight        embedding -
        layers.0.self_attention.linear_qkv.layer_norm_weight        norm 0
        layers.2.mixer.D                                            ssm 2
        layers.2.mixer.conv1d.weight                                ssm 2
        conv1d.weight                                               other -
        encoder.layers.0.post_attention.conv1d.weight               attention 0
        layers.1.visn_self_att.self.query.weight                    attention 1
        mid.attn_1.proj_out.weight                                  attention -
        vision_tower.patch_conv.weight                              embedding -
        text_to_mm_projection.weight                                embedding -
        aligner.fc1.weight                                          embedding -
        encoder.layer.3.layout_intermediate.dense.weight            mlp 3
        model.decoder.output_projection.weight                      head -
        model.D                                                     other -
    """,
}
CASES = [
    pytest.param(*line.split(), id=line.split()[0])
    for lines in NAMES.values()
    for line in lines.strip().splitlines()
]
FAMILIES = list(dict.fromkeys(param.family for param in labelled()))
WRAPPERS = [
    "module.",
    "module.module.",
    "_orig_mod.",
    "_orig_mod.module.",
    "module._fsdp_wrapped_module.",
]


@pytest.mark.parametrize(("name", "role", "layer"), CASES)
def test_role_and_layer(name: str, role: str, layer: str):
    assert role_of(name) == role
    assert layer_of(name) == (None if layer == "-" else int(layer))


@pytest.mark.parametrize("family", FAMILIES)
def test_roles_of_a_family(family: str):
    """`tests/data/role-names.txt`; the names of most models that people train."""
    judge, mine = judged(roles), [param for param in labelled() if param.family == family]
    wrong = {p.name: judge(p) for p in mine if judge(p) != (p.role, p.matrix)}
    assert mine
    assert not wrong


def test_misjudged_parameters_are_counted(monkeypatch: pytest.MonkeyPatch):
    counts = misjudged(roles)
    assert set(counts) == set(FAMILIES)
    assert counts["gpt_neox"] == (267, 0)
    patterns = [(role, pattern) for role, pattern in roles._PATTERNS if role != "head"]
    monkeypatch.setattr(roles, "_PATTERNS", tuple(patterns))
    monkeypatch.setattr(roles, "role_of", roles.role_of.__wrapped__)  # what it knew is of before
    assert misjudged(roles)["gpt_neox"] == (267, 1)


@pytest.mark.parametrize(
    ("name", "shape", "why"),
    [
        ("layers.0.mixer.conv1d.weight", (64, 1, 4), "state-space"),
        ("layers.0.mixer.A_log", (64, 16), "state-space"),
        ("layers.0.mlp.experts.down_proj_bias", (8, 64), "bias"),
        ("layers.0.conv.depthwise_conv.weight", (64, 1, 31), "one row each"),
        ("embeddings.cls_token", (1, 1, 64), "one row each"),
        ("layers.0.mlp.up_proj.bias", (64,), "one dimension"),
        ("layers.0.mlp.experts.down_proj", (8, 64, 64), ""),
        ("relative_attention_bias.weight", (32, 8), ""),
        ("w", (64, 1), ""),
    ],
)
def test_what_is_no_matrix(name: str, shape: tuple[int, ...], why: str):
    assert ParamInfo.of(name, shape).no_matrix == why


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
    said = str(tagc.explain(shapes, "attn-only", world_size=2))
    assert (
        "- 4 matrices have role other, as names tell no more: fc.weight, proj.weight and 2 more"
        in said
    )
    line = next(t for t in said.splitlines() if "blocks.0.proj.weight" in t and "role" not in t)
    assert " attention " in line
    assert "role other" not in str(tagc.explain(shapes, "dense", world_size=2))


def test_every_role_is_covered():
    assert {case.values[1] for case in CASES} == set(ROLES)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("inner", ["_checkpoint_wrapped_module", "_fsdp_wrapped_module"])
def test_wrappers_are_transparent(wrapper: str, inner: str):
    wrapped = f"{wrapper}layers.7.{inner}._orig_mod.attention.wq.weight"
    assert clean_name(wrapped) == "layers.7.attention.wq.weight"
    assert role_of(wrapped) == "attention"
    assert layer_of(wrapped) == 7


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapped_head_is_still_at_the_top(wrapper: str):
    assert role_of(f"{wrapper}output.weight") == "head"
    assert role_of(f"{wrapper}shared.weight") == "embedding"


@pytest.mark.parametrize("name", ["encoder.module.w1.weight", "my_module.w1.weight", "module"])
def test_a_users_own_module_is_kept(name: str):
    assert clean_name(name) == name


def test_param_info():
    param = ParamInfo.of("module.layers.3.attention.wq.weight", (64, 48))
    assert (param.name, param.role, param.layer) == (
        "module.layers.3.attention.wq.weight",
        "attention",
        3,
    )
    assert (param.ndim, param.numel) == (2, 64 * 48)
    assert ParamInfo.of("scale", ()).numel == 1
