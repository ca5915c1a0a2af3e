"""Shapes from the ``config.json`` of a transformers model.

Those of common dense decoders are written down in :mod:`tagc.costs.models.families`, so that
neither transformers nor seconds are needed; others are asked of transformers, if it is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tagc.costs.models.families import FAMILIES, decoder
from tagc.costs.shapes import MAX_LAYERS, ModelError, ModelShapes
from tagc.policy.suggest import short


def from_config(path: Path, config: Mapping[str, Any]) -> ModelShapes:
    """The model with its language-model head, as the config describes it.

    Args:
        config: what ``path`` holds.

    Raises:
        ModelError: if the family is not known here and transformers cannot say, or the config lacks
            something.
    """
    kind, names = config.get("model_type"), config.get("architectures") or [None]
    if not isinstance(names, list) or not all(n is None or isinstance(n, str) for n in names):
        raise ModelError(f"{path}: architectures is {names!r:.80}, no list of names")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is not None and names[0] in (None, family.architecture):
        return ModelShapes.of(decoder(family, config, str(path)), f"{path.name} of {kind}")
    what = f"{path} is of {kind if names[0] is None else names[0]}"
    _check_counts(config, path)
    if importlib.util.find_spec("transformers") is None:
        raise ModelError(
            f"{what}, whose shapes tagc does not know (it knows {', '.join(FAMILIES)}, with a "
            "language-model head). pip install transformers, and they are taken from there; or "
            "give the model's safetensors files, or module:function"
        )
    try:
        model = _by_transformers(path, names[0])
    except Exception as error:
        raise ModelError(
            f"{what}, whose shapes tagc does not know, and transformers does not make one on the "
            f"meta device: {type(error).__name__}: {error}. Give the model's safetensors files, or "
            "module:function"
        ) from error
    return ModelShapes.of(model, f"{path.name} of {kind}, by transformers")


_COUNT = re.compile(r"(?:^|_)n(?:um)?_.*(?:layer|block|expert)|layers$")


def _check_counts(config: object, path: Path) -> None:
    """Refuse numbers of modules that would keep transformers busy for hours, in any sub-config."""
    inside = config.values() if isinstance(config, dict) else config
    for value in inside if isinstance(inside, Iterable) and not isinstance(inside, str) else ():
        _check_counts(value, path)
    for name, value in config.items() if isinstance(config, dict) else ():
        if type(value) is int and value > MAX_LAYERS and _COUNT.search(name):
            raise ModelError(f"{path}: {name} is {short(value):.40}, more than {MAX_LAYERS:,}")


def _by_transformers(path: Path, name: str | None) -> nn.Module:
    """Nothing is downloaded, and no code that lies beside the config is run."""
    transformers: Any = importlib.import_module("transformers")
    config = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True)
    with torch.device("meta"):
        if name is not None and hasattr(transformers, name):
            return getattr(transformers, name)(config)
        return transformers.AutoModelForCausalLM.from_config(config)
