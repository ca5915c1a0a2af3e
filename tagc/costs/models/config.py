"""Shapes from the ``config.json`` of a transformers model. transformers builds the model on the
meta device, without weights, in seconds."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tagc.costs.shapes import MAX_LAYERS, MAX_PARAMETERS, ModelError, ModelShapes
from tagc.policy.suggest import short


def from_config(path: Path, config: Mapping[str, Any]) -> ModelShapes:
    """The model with its language-model head, as the config describes it.

    Args:
        config: the content of ``path``.

    Raises:
        ModelError: if ``config`` is not valid, or transformers is not installed or cannot build the
            model.
    """
    kind, names = config.get("model_type"), config.get("architectures") or [None]
    if not isinstance(names, list) or not all(n is None or isinstance(n, str) for n in names):
        raise ModelError(f"{path}: architectures is {names!r:.80}, not a list of names")
    _check_sizes(config, path)
    if importlib.util.find_spec("transformers") is None:
        raise ModelError(
            f"{path} is a transformers config. To build its model, pip install transformers "
            "(tagc[recipes] has it). Or give the model's safetensors files, or module:function"
        )
    try:
        model = _by_transformers(path, names[0])
    except Exception as error:
        raise ModelError(
            f"{path} is a config of {kind if names[0] is None else names[0]}, but transformers "
            f"cannot build it on the meta device: {type(error).__name__}: {error}. Give the "
            "model's safetensors files, or module:function"
        ) from error
    return ModelShapes.of(model, f"{path.name} of {kind}")


_COUNT = re.compile(r"(?:^|_)n(?:um)?_.*(?:layer|block|expert)|layers$")


def _check_sizes(config: object, path: Path) -> None:
    """Refuse sizes that no model has, and numbers of modules that would take transformers hours.
    This includes sub-configs."""
    inside = config.values() if isinstance(config, dict) else config
    for value in inside if isinstance(inside, Iterable) and not isinstance(inside, str) else ():
        _check_sizes(value, path)
    for name, value in config.items() if isinstance(config, dict) else ():
        most = MAX_LAYERS if _COUNT.search(name) else MAX_PARAMETERS
        if type(value) is int and value > most:
            raise ModelError(f"{path}: {name} is {short(value):.40}, more than {most:,}")


def _by_transformers(path: Path, name: str | None) -> nn.Module:
    """Build the model. This downloads nothing, and runs no code from the config's folder."""
    transformers: Any = importlib.import_module("transformers")
    config = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True)
    with torch.device("meta"):
        if name is not None and hasattr(transformers, name):
            return getattr(transformers, name)(config)
        return transformers.AutoModelForCausalLM.from_config(config)
