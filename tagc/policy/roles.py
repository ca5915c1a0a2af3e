"""Reads from a parameter's name which part of a transformer it belongs to.

A policy selects parameters by role and by layer (see `tagc.policy`). Both come from the fully
qualified name, so a plan can be made before any weight is materialised.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Self, get_args

Role = Literal["attention", "mlp", "embedding", "head", "norm", "router", "ssm", "other"]
"""`attention`: projections of attention and of its replacements, such as linear attention and
state-space mixers. `mlp`: MLPs, including experts. `embedding`: everything that turns inputs into
vectors: tables of tokens, positions and relative positions, stems for images and speech, and
projections from one modality to another. `head`: everything that turns vectors into outputs.
`norm`: norms. `router`: routers of experts. `ssm`: the parameters of a recurrence itself (A, D, Δ,
the short convolution), which are not matrices. `other`: the rest."""

ROLES: tuple[Role, ...] = get_args(Role)


def clean_name(name: str) -> str:
    """The parameter's name in the model as the user wrote it, without wrapper prefixes.

    `module.layers.0._checkpoint_wrapped_module.mlp.w1` becomes `layers.0.mlp.w1`. A `module`
    further in is kept, because it can be a submodule's own name.
    """
    return _LEADING_MODULE.sub("", plain_name(name))


def plain_name(name: str) -> str:
    """The name without the parts that compilation, checkpointing and FSDP1 insert. Unlike clean
    names, these differ if a model has a `weight` and a `module.weight`."""
    return _WRAPPER.sub("", name)


@lru_cache(maxsize=1 << 16)  # a plan asks for every parameter several times
def role_of(name: str) -> Role:
    """The role of a parameter by its fully qualified name; `other` if nothing is recognised.

    A bias has the role of its projection. A norm is `norm` in every module.
    """
    name = clean_name(name)
    for role, pattern in _PATTERNS:
        if pattern.search(name):
            return role
    return "other"


# The last projection of attention or of an mlp, by names that do not say which.
_ADAPTER = re.compile("lora_|base_layer")
_LAST = ("proj", "c_proj", "out", "out_proj", "o", "wo")


def roles_beside(names: Iterable[str]) -> dict[str, Role]:
    """The roles of parameters that their own names do not tell, but their neighbours' do: a `proj`
    beside a `qkv` is attention's, one beside an `fc` only is the mlp's.

    Args:
        names: fully qualified names of a model's parameters.

    Returns:
        Roles by :func:`clean_name`, without those that stay `other`.
    """
    cleaned = [clean_name(name) for name in names]
    children: dict[str, dict[str, None]] = {}
    for name in cleaned:
        parts = name.split(".")
        for i in range(1, len(parts) - 1):
            children.setdefault(".".join(parts[:i]), {})[parts[i]] = None
    found: dict[str, Role] = {}
    for name in cleaned:
        parts = name.split(".")
        at = max((i for i, part in enumerate(parts[:-1]) if part in _LAST), default=0)
        if at and role_of(name) == "other":
            beside = ".".join(parts[:at])
            # A whole module `attn` beside it holds its own last projection.
            roles = {
                role_of(f"{beside}.{child}.weight")
                for child in children[beside]
                if all(_ADAPTER.match(inner) for inner in children.get(f"{beside}.{child}", ()))
            }
            for role in ("attention", "mlp"):
                if role in roles:
                    found.setdefault(name, role)
    return found


def layer_of(name: str) -> int | None:
    """Index of the transformer block that holds the parameter; None outside the blocks.

    The outermost index counts: `encoder.block.3.layer.1` is block 3, and an expert's number
    within a block is not a layer.
    """
    found = _LAYER.search(clean_name(name))
    return int(found[1]) if found else None


@dataclass(frozen=True, kw_only=True)
class ParamInfo:
    """What a policy knows about a parameter. `shape` is the whole shape, before sharding; `dtype`,
    empty if unknown, is the one in which it, or its gradient, is sent without tagc."""

    name: str
    shape: tuple[int, ...]
    role: Role
    layer: int | None
    dtype: str = ""

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], dtype: str = "") -> Self:
        return cls(
            name=name, shape=tuple(shape), role=role_of(name), layer=layer_of(name), dtype=dtype
        )

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def no_matrix(self) -> str:
        """Why the parameter is not a matrix, as text for users; empty if it is one.

        A bias is a vector, although the biases of stacked experts are `[E, f]` together. A
        depthwise convolution is `[C, 1, k]`, a few numbers for each channel.
        """
        if self.ndim < 2:
            return "one dimension"
        if self.role == "ssm":
            return "state-space"
        if self.ndim > 2 and self.shape[1] == 1:
            return "one row each"
        return "bias" if _BIAS.search(self.name) else ""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


_BIAS = re.compile(r"(?:^|[._])bias$")

# torch.compile, activation checkpointing and FSDP1 insert these anywhere in a name.
_WRAPPER = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\."
)
_LEADING_MODULE = re.compile(r"^(?:module\.)+")

# A stem's conv_layers are not layers of the model.
_LAYER = re.compile(
    r"(?:^|\.)(?!conv_layers)(?:h|\w*layers?|\w*blocks?)\.([0-9]{1,18})\.", re.IGNORECASE
)


def _of(
    role: Role, *alternatives: str, start: str = r"(?:^|\.)", end: str = r"(?:\.|$)"
) -> tuple[Role, re.Pattern]:
    """A pattern for whole dot-separated components: `gate` does not find `gate_proj`."""
    return role, re.compile(f"{start}(?:{'|'.join(alternatives)}){end}", re.IGNORECASE)


# The prefix allowed before names that have a meaning only at the top of a model.
_TOP = r"^(?:[a-z_]\w*\.)?"
_MIXER = r"(?:mixer|mamba\w*|ssm|temporal_block|short_conv|\w*attn\w*|(?:self|linear)_attention)\."

# The first pattern found decides, so the order is part of the meaning.
_PATTERNS: tuple[tuple[Role, re.Pattern], ...] = (
    # Before attention and embedding: post_attention_layernorm, embeddings.LayerNorm, q_norm.
    # Only the module that owns the parameter counts: norm1.linear.weight is a projection.
    _of("norm", r"\w*norm[0-9]*(?:_\w+)?", r"ln(?:_?\w+)?|grn", end=r"(?:\.\w+)?$"),
    # Before attention, because they are in its modules.
    _of("ssm", r"A_log|dt_(?:proj_)?bias|rg_lru|time_(?:decay|first|mix\w*|maa\w*)"),
    _of("ssm", r"D|[qkv]?_?conv_?1d", start=rf"(?:^|\.){_MIXER}"),
    _of(
        "embedding",
        r"relative_(?:attention|position)_bias(?:_table)?|continuous_position_bias_mlp",
        r"attention_biases|distance_embedding|rel_pos(?:_[hw]|_emb|(?:_[xy])?_bias)?",
    ),
    _of("router", r"router"),
    # Perceivers hold their mlp in the attention, and a pooling attention is a block of its own.
    _of("mlp", r"mlp", start=r"(?:^|\.)(?:\w+_)?(?:attn|attention|attn_pool)\."),
    # Before router and mlp: self_attn.gate is not a router, attention.output.dense not an mlp.
    _of(
        "attention",
        r"\w*(?:attn|attention)_?[0-9]*|\w+_attn_\w+_to_\w+|attn_pool",
        r"(?:\w+_)?att|mha|temporal_block|mlstm_layer",
        # Blocks that hold their projections directly. `wo` is missing: T5 has it in its mlp.
        r"[qkvo]_proj|qkv(?:_proj)?|w[qkv]|wqkv|query_key_value|c_attn|in_proj_(?:weight|bias)",
        r"to_(?:q|k|v|kv|qkv|out|add_out)|linear_(?:qkv|kv)",
    ),
    # The block around a state-space recurrence. Nemotron's `mixer` can also be an mlp.
    _of("attention", r"(?:in|out|x|dt)_proj", start=r"(?:^|\.)(?:mixer|mamba\w*|ssm|conv)\."),
    # `gate` alone is a router; the gate of a gated mlp is called gate_proj, w1 or wi_0.
    _of("router", r"gate|shared_expert_gate"),
    # Before head and mlp: projections to the hidden size of another modality.
    _of(
        "embedding",
        r"multi_modal_projector|mm_projector|modality_projection|\w*merger(?:_list)?",
        r"(?:language|caption|feature|\w+_to_\w+)_projection|(?:\w+_)?aligner|patch_conv",
    ),
    # Before embedding, because of embed_out. `output` is torchtitan's head only outside the blocks:
    # BERT's blocks have an output.dense.
    _of(
        "head",
        r"(?:\w+_)?head",
        r"embed_out|unembed|classifier|score|cls|pooler|qa_outputs|vocab_(?:transform|projector)",
        r"to_logits|(?:\w+_)?predictions",
    ),
    _of(
        "head",
        r"output|proj_out(?:_[12])?|(?:visual|text|audio)_projection",
        # DiT's last layer also has a modulation.
        r"final_layer\.linear",
        start=_TOP,
    ),
    _of("head", r"output_projection", start=r"(?:^|\.)decoder\."),
    # Megatron's head; other models have an output_layer in their blocks.
    _of("head", r"output_layer", start=r"^(?:(?:model|module|language_model)\.)?"),
    _of(
        "embedding",
        r"(?:\w*_)?emb(?:ed|eds|edder|edding|eddings)?(?:_\w+)?|wte|wpe|word_embeddings",
        # Stems.
        r"feature_extractor|subsampling|time_step_proj|input_projections?",
        # An embedder can hold whole blocks, which are not embeddings.
        end=r"(?:\.(?!.*blocks\.[0-9])|$)",
    ),
    _of("embedding", r"shared|stem|img_in|txt_in", start=_TOP),
    _of("embedding", r"conv[1-3]?", start=r"(?:^|\.)(?:encoder|audio_tower)\."),
    _of("embedding", r"tok|pos", start=_TOP, end=r"(?:\.weight)?$"),
    # Learned inputs: cls_token, query_tokens.
    _of("embedding", r"\w+_tokens?|latents", end=r"(?:\.weight)?$"),
    _of(
        "mlp",
        r"\w*mlps?|ffn\w*|ff[0-9]?|ff_context|feed_?forward[0-9]?|\w*moe|(?:shared_)?experts?",
        r"Dense(?:Relu|GatedAct)Dense|(?:\w+_)?intermediate(?:_query)?|output_query|[0-9]+\.output",
        r"fc[12]|c_fc|lin(?:ear)?[12]|w[123]|(?:gate|up|down|gate_up)_proj",
        r"dense_h_to_4h|dense_4h_to_h|pwconv[12]",
    ),
    # Outside the blocks, `fc` is a classifier.
    _of("mlp", r"fc", start=r"(?:^|\.)(?:h|\w*layers?|\w*blocks?)\.[0-9]+\.(?:\w+\.)*"),
    # Attention and mlp in one; the mlp is the larger part.
    _of("mlp", r"proj_out", start=r"single_transformer_blocks\.[0-9]+\."),
)
