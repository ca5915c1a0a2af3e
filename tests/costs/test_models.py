"""Models that a command line names: configs, headers of safetensors files, functions."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tagc.costs.model_files import load_model
from tagc.costs.shapes import ModelError, ModelShapes

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
}


def write(path: Path, data: object) -> str:
    path.write_text(json.dumps(data))
    return str(path)


def shapes(model: ModelShapes) -> dict[str, tuple[int, ...]]:
    return {p.name: p.shape for p in model.params}


def test_without_transformers_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    path = write(tmp_path / "config.json", LLAMA)
    with pytest.raises(ModelError, match="To build its model, pip install transformers"):
        load_model(path)


@pytest.mark.recipes
def test_configs_of_published_models(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="pip install tagc[recipes]")
    model = load_model(write(tmp_path / "config.json", LLAMA))
    found = shapes(model)
    assert list(found)[:5] == [
        "model.embed_tokens.weight",
        *(f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkvo"),
    ]
    assert found["model.layers.1.self_attn.k_proj.weight"] == (24, 48)
    assert model.blocks == ("model.layers.0", "model.layers.1")
    tied = shapes(load_model(write(tmp_path / "c.json", LLAMA | {"tie_word_embeddings": True})))
    assert found.keys() - tied.keys() == {"lm_head.weight"}
    # https://huggingface.co/meta-llama/Llama-2-7b-hf has 6.74 B parameters.
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000}
    assert load_model(write(tmp_path / "7b.json", LLAMA | sizes | heads)).numel == 6_738_415_616


# Headers of safetensors files

TENSORS = {
    "layers.0.w": torch.zeros(6, 4, dtype=torch.bfloat16),
    "layers.1.w": torch.zeros(6, 4, dtype=torch.bfloat16),
    "scale": torch.zeros([], dtype=torch.float32),
    "position_ids": torch.zeros(3, dtype=torch.int64),
}
PARAMETERS = {"layers.0.w": (6, 4), "layers.1.w": (6, 4), "scale": ()}


def in_two_files(folder: Path) -> Path:
    names = list(TENSORS)
    parts = {"a.safetensors": names[:2], "b.safetensors": names[2:]}
    for file, part in parts.items():
        save_file({name: TENSORS[name] for name in part}, folder / file)
    index = folder / "model.safetensors.index.json"
    write(index, {"weight_map": {name: file for file, part in parts.items() for name in part}})
    return index


def test_headers(tmp_path: Path) -> None:
    file = tmp_path / "one.safetensors"
    save_file(TENSORS, file, metadata={"format": "pt"})
    one = load_model(str(file))
    assert shapes(one) == PARAMETERS
    assert one.blocks == ("layers.0", "layers.1")
    left = "without 1 tensors that are not floating point"
    assert one.source == f"one.safetensors, BF16/F32, {left}"
    assert load_model(str(tmp_path)) == one
    # Only the header is read: the rest need not be there.
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    file.write_bytes(content[: 8 + length])
    assert load_model(str(file)) == one


def test_an_index_of_several_files(tmp_path: Path) -> None:
    index = in_two_files(tmp_path)
    several = load_model(str(index))
    assert shapes(several) == PARAMETERS
    assert several.source.startswith("model.safetensors.index.json of 2 files, BF16/F32")
    assert load_model(str(tmp_path)) == several
    save_file({"other": torch.zeros(1, dtype=torch.float32)}, tmp_path / "b.safetensors")
    with pytest.raises(ModelError, match=r"names scale in b\.safetensors, but it is not there"):
        load_model(str(index))
    index.unlink()
    with pytest.raises(ModelError, match=r"several safetensors files.*a\.safetensors, b\."):
        load_model(str(tmp_path))


def test_functions_may_return_a_state_dict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made_here.py").write_text(
        "import torch\n"
        "def state():\n"
        "    tied = torch.empty(1 << 40, 8, dtype=torch.float32)\n"  # on the meta device only
        "    return {'wte': tied, 'h.0.w': torch.empty(3, 2), 'h.1.w': torch.empty(3, 2),\n"
        "            'mask': torch.ones(4, dtype=torch.bool), 'head': tied}\n"
        "def wrong():\n"
        "    return {'a': 1}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    model = load_model("made_here:state")
    assert shapes(model) == {"wte": (1 << 40, 8), "h.0.w": (3, 2), "h.1.w": (3, 2)}
    assert model.blocks == ("h.0", "h.1")
    with pytest.raises(ModelError, match=r"returned dict, neither an nn\.Module nor a state dict"):
        load_model("made_here:wrong")


def test_blocks_by_name() -> None:
    names = {f"{stack}.layers.{i}.mlp.experts.{i}.w1": [8, 8] for stack in "ed" for i in range(2)}
    found = ModelShapes.of(names | {"head.0.weight": [8, 8]}).blocks
    assert found == ("e.layers.0", "e.layers.1", "d.layers.0", "d.layers.1")


def test_layer_1_is_no_prefix_of_layer_10() -> None:
    shapes = ModelShapes.of({f"layers.{i}.w.weight": [4, i + 1] for i in range(12)})
    reduces, gathers = shapes.units(2, torch.float32, torch.bfloat16)
    assert [[p.name for p in u.params] for u in reduces] == [
        [f"layers.{i}.w.weight"] for i in range(12)
    ]
    assert {u.per_step for u in gathers} == {2}
    assert load_model("1e6").blocks
