"""Reads the model that a command line names, without its weights."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tagc.basics.files import read_regular
from tagc.basics.quantities import count
from tagc.costs.models.config import from_config
from tagc.costs.models.function import from_function
from tagc.costs.models.headers import INDEX, from_file, from_folder, from_index
from tagc.costs.shapes import ModelError, ModelShapes, synthetic

_LARGEST = 100_000_000  # bytes of a JSON file


def load_model(spec: str) -> ModelShapes:
    """Read the model that a command line names.

    Args:
        spec: a number of parameters, for a synthetic transformer; a ``config.json`` of
            transformers; a safetensors file, the ``.index.json`` of several, or a folder with any
            of these; ``module:function``, called without arguments on the meta device, which
            returns an nn.Module or a state dict; or a JSON file of shapes by name.

    Raises:
        ModelError: if ``spec`` names no valid model.
    """
    path = Path(spec)
    if os.path.isdir(path):  # Path.is_dir raises if a name is too long
        return _from_folder(path)
    if path.suffix == ".safetensors":
        return from_file(path)
    if path.suffix == ".json":
        return _from_json(path)
    if ":" in spec:
        return from_function(spec)
    try:
        numel = count(spec)
    except Exception:
        raise ModelError(
            f"no model {spec!r:.80}: give a number of parameters (7e9), a config.json of "
            "transformers, a safetensors file, an index of several, or a folder with any of these; "
            "module:function (a function without arguments that returns an nn.Module or a state "
            "dict); or a JSON file of shapes by name"
        ) from None
    return synthetic(numel)


def _from_folder(folder: Path) -> ModelShapes:
    found = from_folder(folder)
    if found is not None:
        return found
    config = folder / "config.json"
    if os.path.exists(config):
        return _from_json(config)
    raise ModelError(f"{folder} has neither safetensors files nor a config.json")


def _from_json(path: Path) -> ModelShapes:
    try:
        data: Any = json.loads(read_regular(path, _LARGEST).decode())
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"cannot read a model from {path}: {why}") from None
    if isinstance(data, dict) and INDEX in data:
        return from_index(path, data)
    if isinstance(data, dict) and ("model_type" in data or "architectures" in data):
        return from_config(path, data)
    if not isinstance(data, dict) or not data or not all(map(_is_shape, data.values())):
        raise ModelError(
            f"{path} holds no model: neither a config of transformers (it has no model_type), nor "
            "an index of safetensors files, nor an object of parameter names and shapes such as "
            '{"lm_head.weight": [32000, 4096]}'
        )
    return ModelShapes.of(data)


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and n > 0 for n in value)
