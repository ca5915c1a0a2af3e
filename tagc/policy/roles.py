"""Which part of a transformer a parameter belongs to, read from its name.

A policy selects parameters by role and by layer (see `tagc.policy`). Both come from the fully
qualified name, so that a plan can be made before any weight is materialised.
"""

import math
import re
from dataclasses import dataclass
from typing import Literal, Self, get_args

__all__ = ["ROLES", "ParamInfo", "Role", "clean_name", "layer_of", "role_of"]

Role = Literal["attention", "mlp", "embedding", "head", "norm", "router", "other"]

ROLES: tuple[Role, ...] = get_args(Role)


def clean_name(name: str) -> str:
    """The parameter's name in the model as the user wrote it, without wrapper prefixes.

    `module.layers.0._checkpoint_wrapped_module.mlp.w1` becomes `layers.0.mlp.w1`. A `module`
    further in is kept: there it can be a submodule's own name.
    """
    return _LEADING_MODULE.sub("", _WRAPPER.sub("", name))


def role_of(name: str) -> Role:
    """One of `ROLES` for a parameter's fully qualified name; `other` if nothing is recognised.

    A bias has the role of the projection it belongs to. A norm is a norm wherever it stands.
    """
    name = clean_name(name)
    for role, pattern in _PATTERNS:
        if pattern.search(name):
            return role
    return "other"


def layer_of(name: str) -> int | None:
    """Index of the transformer block that holds the parameter, or None outside of the blocks.

    The outermost index counts: `encoder.block.3.layer.1` is block 3, and an expert's number
    within a block is not a layer.
    """
    found = _LAYER.search(clean_name(name))
    return int(found[1]) if found else None


@dataclass(frozen=True, kw_only=True)
class ParamInfo:
    """What a policy knows of a parameter: `shape` is the whole one, before sharding."""

    name: str
    shape: tuple[int, ...]
    role: Role
    layer: int | None

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...]) -> Self:
        """Reads role and layer from the fully qualified `name`, which is kept as given."""
        return cls(name=name, shape=tuple(shape), role=role_of(name), layer=layer_of(name))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def no_matrix(self) -> str:
        """Why rows and columns of the parameter mean nothing, for people; empty if they do.

        A bias is a vector, though those of stacked experts are, together, `[E, f]`.
        """
        if self.ndim < 2:
            return "one dimension"
        if self.role == "ssm":
            return "state-space"
        return "bias" if _BIAS.search(self.name) else ""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


_BIAS = re.compile(r"(?:^|[._])bias$")

# torch.compile, activation checkpointing and FSDP1 put these anywhere in a name.
_WRAPPER = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\."
)
_LEADING_MODULE = re.compile(r"^(?:module\.)+")

_LAYER = re.compile(r"(?:^|\.)(?:h|\w*layers?|\w*blocks?)\.([0-9]+)\.", re.IGNORECASE)


def _component(*alternatives: str, start: str = r"(?:^|\.)", end: str = r"(?:\.|$)") -> re.Pattern:
    """A pattern for whole dot-separated components: `gate` does not find `gate_proj`."""
    return re.compile(f"{start}(?:{'|'.join(alternatives)}){end}", re.IGNORECASE)


# The first pattern found decides, so the order is part of the meaning.
_PATTERNS: tuple[tuple[Role, re.Pattern], ...] = (
    # Before attention and embedding: post_attention_layernorm, embeddings.LayerNorm, q_norm.
    # Only as the module that owns the parameter: the projection in norm1.linear.weight is none.
    ("norm", _component(r"\w*norm[0-9]*(?:_\w+)?", r"ln(?:_?\w+)?", end=r"(?:\.\w+)?$")),
    # Before router and mlp: self_attn.gate is no router, and attention.output.dense no mlp.
    (
        "attention",
        _component(
            r"\w*(?:attn|attention)[0-9]*",
            r"att|mha",
            # Blocks that hold their projections directly. `wo` is missing: T5 has it in its mlp.
            r"[qkvo]_proj|qkv(?:_proj)?|w[qkv]|wqkv|query_key_value|c_attn|in_proj_(?:weight|bias)",
        ),
    ),
    # An exact `gate` is a router's; the gate of a gated mlp is called gate_proj, w1 or wi_0.
    ("router", _component(r"router|gate|shared_expert_gate")),
    # Before embedding: embed_out. `output` is torchtitan's head only outside of the blocks, as
    # BERT's blocks have an output.dense too.
    (
        "head",
        _component(
            r"(?:\w+_)?head",
            r"embed_out|unembed|classifier|score|cls|pooler|qa_outputs|vocab_(?:transform|projector)",
        ),
    ),
    ("head", _component(r"output", start=r"^(?:[a-z_]\w*\.)?")),
    (
        "embedding",
        _component(r"(?:\w*_)?emb(?:ed|edding|eddings)?(?:_\w+)?", r"wte|wpe|word_embeddings"),
    ),
    ("embedding", _component(r"shared", start=r"^(?:[a-z_]\w*\.)?")),
    (
        "mlp",
        _component(
            r"\w*mlp|ffn\w*|ff|feed_?forward|\w*moe|(?:shared_)?experts?",
            r"Dense(?:Relu|GatedAct)Dense|intermediate|[0-9]+\.output",
            r"fc[12]|c_fc|lin(?:ear)?[12]|w[123]|(?:gate|up|down|gate_up)_proj",
            r"dense_h_to_4h|dense_4h_to_h",
        ),
    ),
)
