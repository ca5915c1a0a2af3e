"""Models that a command line names: configs, headers of safetensors files, functions."""

from __future__ import annotations

import importlib
import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tagc.costs.models import load_model
from tagc.costs.models.families import FAMILIES
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


# Configs of transformers


def test_a_config_of_llama(tmp_path: Path) -> None:
    model = load_model(write(tmp_path / "config.json", LLAMA))
    found = shapes(model)
    assert list(found)[:5] == [
        "model.embed_tokens.weight",
        *(f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkvo"),
    ]
    assert found["model.layers.1.self_attn.k_proj.weight"] == (24, 48)
    assert found["model.layers.1.mlp.down_proj.weight"] == (48, 80)
    assert found["lm_head.weight"] == (101, 48)
    assert model.blocks == ("model.layers.0", "model.layers.1")
    assert model.source == "config.json of llama"
    tied = shapes(load_model(write(tmp_path / "c.json", LLAMA | {"tie_word_embeddings": True})))
    assert found.keys() - tied.keys() == {"lm_head.weight"}
    # A published model: https://huggingface.co/meta-llama/Llama-2-7b-hf has 6.74 B parameters.
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000}
    assert load_model(write(tmp_path / "7b.json", LLAMA | sizes | heads)).numel == 6_738_415_616


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, r"config\.json: hidden_size is None, no number of anything"),
        ({"num_hidden_layers": "2"}, r"num_hidden_layers is '2'"),
        ({"architectures": ["LlamaForTokenClassification"]}, "LlamaForTokenClassification, whose"),
        ({"model_type": "mamba9", "architectures": None}, r"is of mamba9.*knows llama, mistral"),
    ],
)
def test_configs_that_say_too_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(write(tmp_path / "config.json", LLAMA | change))
    if "architectures" in change:
        assert "pip install transformers" in str(caught.value)


@pytest.mark.parametrize("names", ["LlamaForCausalLM", {"a": 1}, [3]])
def test_architectures_that_are_no_list_of_names(tmp_path: Path, names: object) -> None:
    with pytest.raises(ModelError, match=r"config\.json: architectures is .*, no list of names"):
        load_model(write(tmp_path / "config.json", LLAMA | {"architectures": names}))


def test_what_transformers_does_not_know_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path, name: str | None) -> Any:
        raise KeyError("mamba9")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    config = importlib.import_module("tagc.costs.models.config")
    monkeypatch.setattr(config, "_by_transformers", fails)
    path = write(tmp_path / "config.json", {"model_type": "mamba9"})
    with pytest.raises(ModelError, match=r"meta device: KeyError: 'mamba9'\. Give the model's saf"):
        load_model(path)


@pytest.mark.recipes
@pytest.mark.parametrize("kind", FAMILIES)
def test_families_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install tagc[recipes]")
    make = type(transformers.AutoConfig.for_model(kind))
    small = {name: value for name, value in LLAMA.items() if not isinstance(value, list | str)}
    if kind == "gpt2":
        small = {"n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 101, "n_positions": 33}
    small["pad_token_id"] = 0  # that of some families lies beyond so small a vocabulary
    options = [{}, {"attention_bias": True}, {"mlp_bias": True}, {"head_dim": 24}]
    ties: list[dict] = [{}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}]
    for sizes in ({}, *({**small, **option} for option in (*options, *ties))):
        config = make(**sizes)
        config.architectures = [FAMILIES[kind].architecture]
        with torch.device("meta"):
            expected = getattr(transformers, FAMILIES[kind].architecture)(config)
        config.save_pretrained(tmp_path)
        found = load_model(str(tmp_path))
        assert [(p.name, p.shape) for p in found.params] == [
            (name, tuple(p.shape)) for name, p in expected.named_parameters()
        ]
        assert found.blocks == ModelShapes.of(expected).blocks


@pytest.mark.recipes
def test_other_families_are_asked_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install tagc[recipes]")
    config = transformers.BertConfig(hidden_size=48, num_attention_heads=4, intermediate_size=80)
    config.architectures = ["BertForMaskedLM"]
    config.save_pretrained(tmp_path)
    model = load_model(str(tmp_path))
    assert model.source == "config.json of bert, by transformers"
    assert "bert.encoder.layer.0" in model.blocks


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
    left = "1 tensors left out that are not floating point"
    assert one.source == f"one.safetensors, BF16/F32, {left}"
    assert load_model(str(tmp_path)) == one
    # Only the header is read: the rest need not be there.
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    file.write_bytes(content[: 8 + length])
    assert load_model(str(file)) == one


def test_blocks_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    names = [f"layers.{i}.w" for i in range(12)]
    file = tmp_path / "model.safetensors"
    save_file({name: torch.zeros(1, dtype=torch.float32) for name in reversed(names)}, file)
    assert [p.name for p in load_model(str(file)).params] == names


def test_an_index_of_several_files(tmp_path: Path) -> None:
    index = in_two_files(tmp_path)
    several = load_model(str(index))
    assert shapes(several) == PARAMETERS
    assert several.source.startswith("model.safetensors.index.json of 2 files, BF16/F32")
    assert load_model(str(tmp_path)) == several
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"cannot read .*b\.safetensors: No such file"):
        load_model(str(index))
    save_file({"other": torch.zeros(1, dtype=torch.float32)}, tmp_path / "b.safetensors")
    with pytest.raises(ModelError, match=r"there is no scale in b\.safetensors, which the index"):
        load_model(str(index))
    index.unlink()
    with pytest.raises(ModelError, match=r"several safetensors files.*a\.safetensors, b\."):
        load_model(str(tmp_path))


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1", "a pointer of git-lfs.*git lfs pull"),
        (b"abc", "no safetensors file, or cut off"),
        (struct.pack("<Q", 1 << 60) + b"{}", "no safetensors file, or cut off"),
        (struct.pack("<Q", 2) + b"{", "no safetensors file, or cut off"),
        (struct.pack("<Q", 2) + b"{]", "no safetensors file or index"),
        ({}, "names no tensors"),
        ({"w": GOOD | {"shape": [-1]}}, "'w' has no valid dtype, shape"),
        ({"w": GOOD | {"shape": 3}}, "'w' has no valid dtype, shape"),
        ({"w": GOOD | {"dtype": None}}, "'w' has no valid dtype, shape"),
        ({"w": 3}, "'w' has no valid dtype, shape"),
        ({"w": GOOD | {"dtype": "U8"}}, "most of it is U8, as in a quantized.*config.json"),
    ],
)
def test_headers_that_are_not_valid(tmp_path: Path, content: Any, message: str) -> None:
    if isinstance(content, dict):
        header = json.dumps(content).encode()
        content = struct.pack("<Q", len(header)) + header
    file = tmp_path / "bad.safetensors"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        load_model(str(file))


@pytest.mark.parametrize(
    "index", [{"weight_map": []}, {"weight_map": {}}, {"weight_map": {"w": 1}}]
)
def test_indices_that_are_not_valid(tmp_path: Path, index: dict) -> None:
    with pytest.raises(ModelError, match="weight_map is no object"):
        load_model(write(tmp_path / "i.json", index))


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither safetensors files nor a config\.json"):
        load_model(str(tmp_path))
    write(tmp_path / "config.json", LLAMA)
    assert load_model(str(tmp_path)).numel == load_model(str(tmp_path / "config.json")).numel
    with pytest.raises(ModelError, match="holds no model: neither a config"):
        load_model(write(tmp_path / "x.json", {"a": 1}))


def test_what_cannot_be_read(tmp_path: Path) -> None:
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 200_000 + "]" * 200_000)
    with pytest.raises(ModelError, match=r"cannot read a model from .*deep\.json: .*recursion"):
        load_model(str(deep))
    (tmp_path / "model.safetensors.index.json").mkdir()
    with pytest.raises(ModelError, match=r"cannot read .*index\.json: Is a directory"):
        load_model(str(tmp_path))


# Functions


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
