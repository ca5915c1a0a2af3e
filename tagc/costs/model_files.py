"""Reads the model that a command line names, without its weights: from the config of a transformers
model, headers of safetensors files, or what a function returns.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import struct
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tagc.basics.files import open_regular, read_regular
from tagc.basics.quantities import count
from tagc.costs.shapes import MAX_PARAMETERS, ModelError, ModelShapes, synthetic
from tagc.policy.document import short

_LARGEST = 100_000_000  # bytes of a JSON file, and of a header: the format's limit
_INDEX = "weight_map"  # the key that marks an index of several safetensors files
_MOST = 2**63 - 1  # largest size or offset
_FILE = re.compile(r"[^/\\\x00-\x1f\x7f\ud800-\udfff]{1,240}\.safetensors")
_MAX_LAYERS = 1_000
_TRAINED = ("F64", "F32", "F16", "BF16")


def load_model(spec: str) -> ModelShapes:
    """Read the model that a command line names, as ``tagc explain --help`` says. Raises ModelError
    if ``spec`` names no valid model."""
    path = Path(spec)
    if os.path.isdir(path):  # Path.is_dir raises if a name is too long
        return _from_folder(path)
    if path.suffix == ".safetensors":
        return _shapes(_read(path), path.name)
    if path.suffix == ".json":
        return _from_json(path)
    if ":" in spec:
        return _from_function(spec)
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
    indices, files = (sorted(folder.glob(f"*.safetensors{s}")) for s in (".index.json", ""))
    named = [folder / f"model.safetensors{suffix}" for suffix in (".index.json", "")]
    found = [path for path in named if path in (*indices, *files)][:1] or indices or files
    if not found:
        config = folder / "config.json"
        if os.path.exists(config):
            return _from_json(config)
        raise ModelError(f"{folder} has neither safetensors files nor a config.json")
    if len(found) > 1:
        names = ", ".join(path.name for path in found[:3])
        raise ModelError(
            f"{folder} has several safetensors files without an index: name one ({names})"
        )
    return load_model(str(found[0]))


def _from_json(path: Path) -> ModelShapes:
    try:
        data: Any = json.loads(read_regular(path, _LARGEST).decode())
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"cannot read a model from {path}: {why}") from None
    if isinstance(data, dict) and _INDEX in data:
        return _from_index(path, data)
    if isinstance(data, dict) and ("model_type" in data or "architectures" in data):
        return _from_config(path, data)
    if not isinstance(data, dict) or not data or not all(map(_is_shape, data.values())):
        raise ModelError(
            f"{path} holds no model: neither a config of transformers (it has no model_type), nor "
            "an index of safetensors files, nor an object of parameter names and shapes such as "
            '{"lm_head.weight": [32000, 4096]}'
        )
    return ModelShapes.of(data)


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and n > 0 for n in value)


def _from_function(spec: str) -> ModelShapes:
    """Call ``module:function`` without arguments on the meta device, and take the shapes of the
    nn.Module or state dict that it returns."""
    module_name, _, name = spec.partition(":")
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as `python -m` does
    try:
        make = getattr(importlib.import_module(module_name), name)
    except Exception as error:  # a module may raise anything
        what = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
        raise ModelError(
            f"cannot import {spec!r:.80}: {what}{error}. Run the command in the module's folder, "
            "or set PYTHONPATH"
        ) from error
    try:
        with torch.device("meta"):
            model: object = make()
    except Exception as error:
        raise ModelError(
            f"{spec} failed on the meta device: {type(error).__name__}: {error}. It must return a "
            "model when called without arguments"
        ) from error
    if isinstance(model, nn.Module):
        return ModelShapes.of(model)
    if isinstance(model, Mapping) and model and all(isinstance(v, Tensor) for v in model.values()):
        # A tensor with several names, such as tied weights, is listed by the first.
        first = {id(tensor): name for name, tensor in reversed(list(model.items()))}
        return ModelShapes.of(
            {
                name: tuple(tensor.shape)
                for name, tensor in model.items()
                if tensor.is_floating_point() and first[id(tensor)] == name
            }
        )
    raise ModelError(
        f"{spec} returned {type(model).__name__}, neither an nn.Module nor a state dict of tensors"
    )


def _from_config(path: Path, config: Mapping[str, Any]) -> ModelShapes:
    """The model with its language-model head, as the config in ``path`` describes it. transformers
    builds it on the meta device, without weights, in seconds."""
    kind, names = config.get("model_type"), config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    _check_config(config, path)
    if importlib.util.find_spec("transformers") is None:
        raise ModelError(
            f"{path} is a transformers config. To build its model, pip install transformers "
            "(tagc[recipes] has it). Or give the model's safetensors files, or module:function"
        )
    try:
        model = _by_transformers(path, name)
    except Exception as error:
        raise ModelError(
            f"{path} is a config of {name or kind}, but transformers cannot build it on the meta "
            f"device: {type(error).__name__}: {error}. Give the model's safetensors files, or "
            "module:function"
        ) from error
    return ModelShapes.of(model, f"{path.name} of {kind}")


_COUNT = re.compile(r"(?:^|_)n(?:um)?_.*(?:layer|block|expert)|layers$")


def _check_config(config: object, path: Path) -> None:
    """Refuse sizes that no model has, and numbers of modules that would take transformers hours.
    This includes sub-configs."""
    inside = config.values() if isinstance(config, dict) else config
    for value in inside if isinstance(inside, Iterable) and not isinstance(inside, str) else ():
        _check_config(value, path)
    for name, value in config.items() if isinstance(config, dict) else ():
        most = _MAX_LAYERS if _COUNT.search(name) else MAX_PARAMETERS
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


@dataclass(frozen=True)
class _Tensor:
    dtype: str
    shape: tuple[int, ...]
    size: int  # bytes


def _from_index(path: Path, index: Mapping[str, Any]) -> ModelShapes:
    """The model in several safetensors files. ``index``, in ``path``, maps its tensors to them."""
    where = index.get(_INDEX)
    if (
        not isinstance(where, dict)
        or not where
        or not all(isinstance(f, str) for f in where.values())
    ):
        raise ModelError(f"{path}: {_INDEX} is not an object of tensor names and their files")
    for file in (names := dict.fromkeys(where.values())):
        if not _FILE.fullmatch(file):
            raise ModelError(
                f"{path}: {file!r:.80} is not the name of a safetensors file beside it, such as "
                "model-00001-of-00002.safetensors"
            )
    files = {name: _read(path.parent / name) for name in names}
    lost = [f"{name} in {file}" for name, file in where.items() if name not in files[file]]
    if lost:
        raise ModelError(f"{path} names {lost[0]}, but it is not there")
    tensors = {name: files[file][name] for name, file in where.items()}
    return _shapes(tensors, f"{path.name} of {len(files)} files")


def _shapes(tensors: Mapping[str, _Tensor], source: str) -> ModelShapes:
    """Shapes of the floating-point tensors. Others are buffers, or codes of quantized weights."""
    total = sum(tensor.size for tensor in tensors.values())
    trained = {name: tensor for name, tensor in tensors.items() if tensor.dtype in _TRAINED}
    if 2 * sum(tensor.size for tensor in trained.values()) < total:
        kinds = ", ".join(sorted({t.dtype for t in tensors.values()} - set(_TRAINED)))
        raise ModelError(
            f"{source}: most of it is {kinds}, as in a quantized checkpoint, not the weights that "
            "are trained: give the model's config.json"
        )
    dtypes = Counter[str]()
    for tensor in trained.values():
        dtypes[tensor.dtype] += tensor.size
    left = len(tensors) - len(trained)
    about = f"{source}, {'/'.join(dtype for dtype, _ in dtypes.most_common())}"
    if left:
        about += f", without {left} tensors that are not floating point"
    # The order of parameters in modules decides which are adjacent in FSDP's buffers. Files do not
    # record it, so bytes may differ from the model's by a block here or there.
    names = sorted(trained, key=lambda name: re.sub("[0-9]+", lambda n: n[0].zfill(20), name))
    return ModelShapes.of({name: trained[name].shape for name in names}, about)


def _read(path: Path) -> dict[str, _Tensor]:
    """A safetensors file's tensors. Its header is a length in 8 bytes and that many bytes of JSON
    (https://github.com/huggingface/safetensors, "Format"); the rest is not read."""
    try:
        with open_regular(path) as file:
            start = file.read(8)
            if start == b"version ":
                raise ModelError(f"{path} is a git-lfs pointer, not the file: run git lfs pull")
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else _LARGEST + 1
            content = file.read(length) if length <= _LARGEST else b""
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from None
    if len(content) != length:
        raise ModelError(
            f"{path} is not a safetensors file, or truncated: its header is incomplete"
        )
    try:
        header = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not a safetensors file or index: {error}") from None
    if not isinstance(header, dict) or not header:
        raise ModelError(f"{path} names no tensors")
    header.pop("__metadata__", None)
    return {name: _tensor(entry, name, path) for name, entry in header.items()}


def _tensor(entry: Any, name: str, path: Path) -> _Tensor:
    try:
        shape, (begin, end), dtype = tuple(entry["shape"]), entry["data_offsets"], entry["dtype"]
        numbers = (*shape, begin, end, end - begin)
        valid = isinstance(dtype, str) and all(type(n) is int for n in numbers)
        if valid and all(0 <= n <= _MOST for n in numbers):
            return _Tensor(dtype, shape, end - begin)
    except (TypeError, KeyError, ValueError):
        pass
    raise ModelError(f"{path}: {name!r:.80} has no valid dtype, shape and offsets")
