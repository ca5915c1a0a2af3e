"""Messages and their segments start at multiples of 16 bytes, whatever their sizes."""

from __future__ import annotations

import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tagc
from support.distributed import on_ranks
from support.paths import ROOT
from support.small_net import loss_of, sharded
from tagc.collect.transport import HEADER_TAG
from tagc.plan import MessagePlan, UnitPlan

ALIGNED = 16
POLICIES = sorted({path.stem for path in (ROOT / "policies").glob("*.yaml")} - {"auto"})


def llama(width: int, inner: int, layers: int, vocabulary: int, kv: int) -> dict[str, Any]:
    shapes: dict[str, Any] = {f"{n}.weight": (vocabulary, width) for n in ("embed", "lm_head")}
    for i in range(layers):
        layer = f"layers.{i}."
        shapes |= {f"{layer}self_attn.{n}_proj.weight": (width, width) for n in "qo"}
        shapes |= {f"{layer}self_attn.{n}_proj.weight": (kv, width) for n in "kv"}
        shapes |= {f"{layer}mlp.{n}_proj.weight": (inner, width) for n in ("gate", "up")}
        shapes |= {f"{layer}mlp.down_proj.weight": (width, inner)}
        shapes |= {f"{layer}{n}_norm.weight": (width,) for n in ("input", "post_attention")}
    return shapes | {"norm.weight": (width,)}


MODELS = {  # layers are alike: two stand for all
    "Llama 2 7 B": llama(4096, 11008, 2, 32000, 4096),
    "Llama 3 8 B": llama(4096, 14336, 2, 128256, 1024),
    "Qwen 2.5 1.5 B": llama(1536, 8960, 2, 151936, 256),
}
RANKS: dict[str, dict[str, Any]] = {
    "8 ranks": {"world_size": 8},
    "48 ranks, odd shards": {"world_size": 48},
    "8 hosts of 8": {"world_size": 64, "ranks_per_host": 8},
    "4 replicas of 8": {"world_size": 32, "replicas": 4},
}


def messages(unit: UnitPlan) -> list[MessagePlan]:
    return [*unit.flights.values()]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("policy", POLICIES)
def test_messages_of_real_models(policy: str, model: str, ranks: str) -> None:
    """Each row and segment is aligned, for less than a thousandth of the bytes."""
    replicas = {"replicas": [{"when": {}, "codec": {"kind": "quantized", "bits": 4}}]}
    chosen: Any = tagc.Policy.load(policy)
    if chosen.sites is not None:
        sites = {"world_size": RANKS[ranks]["world_size"], "sites": 4}
        check_aligned(tagc.explain(MODELS[model], chosen, **sites), policy)
        return
    if RANKS[ranks].get("replicas") and not chosen.replicas:
        chosen = {"schema": 1, "extends": policy, **replicas}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = tagc.explain(MODELS[model], chosen, dtype=torch.bfloat16, **RANKS[ranks])
    check_aligned(plan, policy)


def check_aligned(plan: Any, policy: str) -> None:
    needed = sent = 0
    for unit in plan.all_units:
        for message in messages(unit):
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


GRADIENTS = [
    {"when": {"name": "first.weight"}, "codec": {"kind": "quantized", "bits": 4, "block": 32}},
    {"when": {"name": "first.*"}, "codec": {"kind": "quantized", "bits": 8, "block": 32}},
    {"when": {"name": "second.*"}, "codec": {"kind": "sketch", "density": 0.3}},
]
PARAMETERS: dict[str, dict[str, Any]] = {
    "messages": {"kind": "quantized", "bits": 8, "block": 32},
    "changes": {"kind": "delta", "bits": 4, "block": 32},
}


@on_ranks(4)
@pytest.mark.parametrize("hosts", [None, 2])
@pytest.mark.parametrize("codec", PARAMETERS)
def test_pointers_given_to_the_backend(
    rank: int, world_size: int, codec: str, hosts: int | None
) -> None:
    found: list[int] = []

    def watched(name: str) -> Any:
        original = getattr(dist, name)

        def call(t: Tensor, *args: Any, tag: int, **kwargs: Any) -> Any:
            if t.dtype == torch.int32 and tag != HEADER_TAG:
                found.append(t.data_ptr() % ALIGNED)
            return original(t, *args, tag=tag, **kwargs)

        return patch.object(dist, name, call)

    rule = {"when": {"name": "*.weight"}, "codec": PARAMETERS[codec]}
    policy = {"schema": 1, "gradients": GRADIENTS, "parameters": [rule], "inside": "int8"}
    model = sharded()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # units as small as these may well cost more compressed
        tagc.wrap(model, policy, hosts=hosts)
    with watched("isend"), watched("irecv"):
        for step in range(2):
            loss_of(model, rank, step).backward()
    assert len(found) > 20
    assert not any(found)
