"""Parameters of common dense decoders of transformers, in the order in which its modules have them.

The recipes' tests compare every family with the model that transformers makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tagc.costs.shapes import MAX_LAYERS, MAX_PARAMETERS, ModelError
from tagc.policy.suggest import short

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Family:
    """What distinguishes a kind of model.

    Attributes:
        architecture: class of transformers with the language-model head.
        tied: whether the head is the embedding, unless the config says.
        head_dim: of attention, unless the config says; None for the width divided by the heads.
        options: what it heeds of ``attention_bias`` and ``mlp_bias`` in a config.
        qkv_bias: whether queries, keys and values have a bias without an option.
        head_norm: norms of queries and keys: of a "head", of "all" heads, or none.
        norms: of a block, by name.
        fused: one matrix for queries, keys and values, and one for gate and up.
    """

    architecture: str
    tied: bool = False
    head_dim: int | None = None
    options: tuple[str, ...] = ()
    qkv_bias: bool = False
    head_norm: str = ""
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    fused: bool = False


_BIASES = ("attention_bias", "mlp_bias")
_GEMMA_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
FAMILIES: dict[str, Family] = {
    "llama": Family(architecture="LlamaForCausalLM", options=_BIASES),
    "mistral": Family(architecture="MistralForCausalLM"),
    "qwen2": Family(architecture="Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM", options=_BIASES[:1], head_dim=128, head_norm="head"
    ),
    "gemma": Family(architecture="GemmaForCausalLM", options=_BIASES[:1], tied=True, head_dim=256),
    "gemma2": Family(
        architecture="Gemma2ForCausalLM",
        options=_BIASES[:1],
        tied=True,
        head_dim=256,
        norms=_GEMMA_NORMS,
    ),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        options=_BIASES[:1],
        tied=True,
        head_dim=256,
        head_norm="head",
        norms=_GEMMA_NORMS,
    ),
    "phi3": Family(architecture="Phi3ForCausalLM", fused=True),
    "olmo2": Family(
        architecture="Olmo2ForCausalLM",
        options=_BIASES[:1],
        head_norm="all",
        norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    "granite": Family(architecture="GraniteForCausalLM", options=_BIASES),
    "smollm3": Family(architecture="SmolLM3ForCausalLM", tied=True, options=_BIASES),
    "gpt2": Family(architecture="GPT2LMHeadModel", tied=True),
}


def decoder(family: Family, config: Mapping[str, Any], where: str) -> Shapes:
    """Shapes by name.

    Args:
        config: of transformers, as JSON has it.
        where: for messages.

    Raises:
        ModelError: if a size is missing.
    """
    c = _Config(config, where)
    return dict(_gpt2(c, family) if family is FAMILIES["gpt2"] else _llama(c, family))


@dataclass(frozen=True)
class _Config:
    config: Mapping[str, Any]
    where: str

    def size(self, name: str, default: int | None = None, *, most: int = MAX_PARAMETERS) -> int:
        value = self.config.get(name)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise ModelError(f"{self.where}: {name} is {short(value):.40}, no number of anything")
        if value > most:
            raise ModelError(f"{self.where}: {name} is {short(value):.40}, more than {most:,}")
        return value

    def switch(self, name: str, default: bool) -> bool:
        value = self.config.get(name)
        return default if value is None else bool(value)


def _linear(name: str, out: int, inner: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (out, inner)
    if bias:
        yield f"{name}.bias", (out,)


def _llama(c: _Config, family: Family) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, heads = c.size("hidden_size"), c.size("num_attention_heads")
    inner, vocabulary = c.size("intermediate_size"), c.size("vocab_size")
    head = c.size("head_dim", family.head_dim or width // heads)
    queries, keys = heads * head, c.size("num_key_value_heads", heads) * head
    o_bias, mlp_bias = (
        option in family.options and c.switch(option, False)
        for option in ("attention_bias", "mlp_bias")
    )
    yield "model.embed_tokens.weight", (vocabulary, width)
    for i in range(c.size("num_hidden_layers", most=MAX_LAYERS)):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        if family.fused:
            yield from _linear(f"{attention}.o_proj", width, queries, False)
            yield from _linear(f"{attention}.qkv_proj", queries + 2 * keys, width, False)
            yield from _linear(f"{mlp}.gate_up_proj", 2 * inner, width, False)
        else:
            for name, out in (("q", queries), ("k", keys), ("v", keys)):
                yield from _linear(
                    f"{attention}.{name}_proj", out, width, family.qkv_bias or o_bias
                )
            yield from _linear(f"{attention}.o_proj", width, queries, o_bias)
            if family.head_norm:
                for name, out in (("q", queries), ("k", keys)):
                    size = head if family.head_norm == "head" else out
                    yield f"{attention}.{name}_norm.weight", (size,)
            yield from _linear(f"{mlp}.gate_proj", inner, width, mlp_bias)
            yield from _linear(f"{mlp}.up_proj", inner, width, mlp_bias)
        yield from _linear(f"{mlp}.down_proj", width, inner, mlp_bias)
        for norm in family.norms:
            yield f"model.layers.{i}.{norm}.weight", (width,)
    yield "model.norm.weight", (width,)
    if not c.switch("tie_word_embeddings", family.tied):
        yield "lm_head.weight", (vocabulary, width)


def _gpt2(c: _Config, family: Family) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, vocabulary = c.size("n_embd"), c.size("vocab_size")
    inner = c.size("n_inner", 4 * width)
    yield "transformer.wte.weight", (vocabulary, width)
    yield "transformer.wpe.weight", (c.size("n_positions"), width)
    for i in range(c.size("n_layer", most=MAX_LAYERS)):
        block = f"transformer.h.{i}"
        yield from _norm(f"{block}.ln_1", width)
        # Its matrices are transposed: rows are inputs.
        for name, rows, columns in (("c_attn", width, 3 * width), ("c_proj", width, width)):
            yield f"{block}.attn.{name}.weight", (rows, columns)
            yield f"{block}.attn.{name}.bias", (columns,)
        yield from _norm(f"{block}.ln_2", width)
        for name, rows, columns in (("c_fc", width, inner), ("c_proj", inner, width)):
            yield f"{block}.mlp.{name}.weight", (rows, columns)
            yield f"{block}.mlp.{name}.bias", (columns,)
    yield from _norm("transformer.ln_f", width)
    if not c.switch("tie_word_embeddings", family.tied):
        yield "lm_head.weight", (vocabulary, width)


def _norm(name: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)
