"""Shapes of a model that a function returns."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from tagc.costs.shapes import ModelError, ModelShapes


def from_function(spec: str) -> ModelShapes:
    """Call ``module:function`` without arguments on the meta device, and take the shapes of the
    nn.Module or state dict that it returns. The parameters of a state dict are its floating-point
    tensors.

    Raises:
        ModelError: if there is no such function, or it fails or returns something else.
    """
    module_name, _, name = spec.partition(":")
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise ModelError(
            f"{spec!r:.80} is not module:function: {module_name!r:.80} is not a module name"
        )
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as `python -m` does
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module may raise anything
        what = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
        raise ModelError(
            f"cannot import module {module_name!r} of {spec!r}: {what}{error}. Run the command in "
            "the module's folder, or set PYTHONPATH"
        ) from error
    make = getattr(module, name, None)
    if not callable(make):
        raise ModelError(f"module {module_name!r} has no function {name!r}")
    try:
        with torch.device("meta"):
            model = cast(Callable[[], object], make)()
    except Exception as error:
        raise ModelError(
            f"{spec} failed on the meta device: {type(error).__name__}: {error}. It must return a "
            "model when called without arguments"
        ) from error
    if isinstance(model, nn.Module):
        return ModelShapes.of(model)
    if isinstance(model, Mapping) and model and all(isinstance(v, Tensor) for v in model.values()):
        return ModelShapes.of(_parameters(model))
    raise ModelError(
        f"{spec} returned {type(model).__name__}, neither an nn.Module nor a state dict of tensors"
    )


def _parameters(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Shapes by name. A tensor with several names, such as tied weights, is listed by the first."""
    first = {id(tensor): name for name, tensor in reversed(list(state.items()))}
    return {
        name: tuple(tensor.shape)
        for name, tensor in state.items()
        if tensor.is_floating_point() and first[id(tensor)] == name
    }
