"""Messages and their segments start at multiples of 16 bytes, whatever their sizes."""

from __future__ import annotations

import warnings
from itertools import product
from typing import Any

import pytest
import torch

import tagc
from support.paths import ROOT

ALIGNED = 16
POLICIES = sorted({path.stem for path in (ROOT / "policies").glob("*.yaml")} - {"auto"})


def llama(width: int, inner: int, vocabulary: int, kv: int) -> dict[str, Any]:
    """Layers are alike: one stands for all."""
    names: dict[str, Any] = {f"{n}.weight": (vocabulary, width) for n in ("embed", "lm_head")}
    names |= {f"layers.0.self_attn.{n}_proj.weight": (width, width) for n in "qo"}
    names |= {f"layers.0.self_attn.{n}_proj.weight": (kv, width) for n in "kv"}
    names |= {f"layers.0.mlp.{n}_proj.weight": (inner, width) for n in ("gate", "up")}
    names |= {"layers.0.mlp.down_proj.weight": (width, inner)}
    names |= {f"layers.0.{n}_norm.weight": (width,) for n in ("input", "post_attention")}
    return names | {"norm.weight": (width,)}


MODELS = {
    "Llama 2 7 B": llama(4096, 11008, 32000, 4096),
    "Qwen 2.5 1.5 B": llama(1536, 8960, 151936, 256),
}
RANKS: tuple[dict[str, Any], ...] = (
    {"world_size": 8},
    {"world_size": 48},  # odd shards
    {"world_size": 64, "ranks_per_host": 8},
    {"world_size": 32, "replicas": 4},
)


@pytest.mark.parametrize("policy", POLICIES)
def test_messages_of_real_models(policy: str) -> None:
    """Each row and segment is aligned, for less than a thousandth of the bytes."""
    replicas = {"replicas": [{"when": {}, "codec": {"kind": "quantized", "bits": 4}}]}
    loaded = tagc.Policy.load(policy)
    for model, shape in product(MODELS.values(), RANKS):
        ranks: dict[str, Any] = {**shape}
        chosen: Any = loaded
        if loaded.sites is not None:
            ranks = {"world_size": ranks["world_size"], "sites": 4}
        else:
            ranks = ranks | {"parameter_dtype": torch.bfloat16}
            if ranks.get("replicas") and not loaded.replicas:
                chosen = {"schema": 1, "extends": policy, **replicas}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plan = tagc.explain(model, chosen, dtype=torch.bfloat16, **ranks)
        check_aligned(plan, policy)


def check_aligned(plan: Any, policy: str) -> None:
    needed = sent = 0
    for unit in plan.all_units:
        for message in unit.flights.values():
            assert 4 * message.row_words % 128 == 0
            at = 0
            for segment in message.segments:
                assert 4 * at % ALIGNED == 0
                at += segment.codec.room
                assert 4 * segment.codec.cells % ALIGNED == 0
                needed += segment.codec.words + segment.codec.cells
                sent += segment.codec.cells
            sent += message.row_words
            assert message.row_words >= at + 2
    assert 0 < needed <= sent <= 1.001 * needed or policy == "dense"
