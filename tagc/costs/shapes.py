"""The units of a model, from shapes alone, without weights or processes.

Units are those that FSDP2 makes if ``fully_shard`` is applied to every transformer block and then
to the model: each block is a unit, and the root holds the rest. Blocks are the children of every
outermost ``nn.ModuleList`` that has at least two children, all of one class. In a list of names, a
block is an outermost prefix that ends in a number, if at least two differ only in that number. The
root keeps its parameters until backward; blocks gather theirs twice a step. Or units are those that
:mod:`tagc.attach.ddp` makes, whatever the blocks.

The model that a command line names is read without its weights: from the config of a transformers
model, headers of safetensors files, or what a function returns.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import re
import struct
import sys
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tagc.attach.ddp import planned_units
from tagc.basics.files import open_regular, read_regular
from tagc.basics.quantities import count
from tagc.plan import UnitInfo, UnitParam
from tagc.policy.document import short


class ModelError(ValueError):
    """The input does not describe a model."""


MAX_PARAMETERS = 10**15
"""Most elements that a model may have. The largest known models have a thousandth of this."""
MAX_TENSORS = 200_000
MAX_LAYERS = 1_000
_LONGEST_NAME = 400


@dataclass(frozen=True, kw_only=True)
class ParamShape:
    """A parameter, before sharding; ``part`` is the shape of this rank's part, if tensor
    parallelism divides it."""

    name: str
    shape: tuple[int, ...]
    trainable: bool = True
    part: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class ModelShapes:
    params: tuple[ParamShape, ...]
    blocks: tuple[str, ...]
    source: str = ""  # what was read, for users

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.params)

    @property
    def data(self) -> dict[str, object]:
        blocks, source = len(self.blocks), self.source or None
        return {"parameters": self.numel, "blocks": blocks, "source": source}

    @classmethod
    def of(cls, model: nn.Module | Mapping[str, Sequence[int]], source: str = "") -> ModelShapes:
        """Take the shapes of a module (on any device), or shapes by name. Raises ModelError if a
        name or a size exceeds what any model has."""
        if isinstance(model, nn.Module):
            # What fully_shard cut is planned whole: for any number of ranks.
            parts = not any(isinstance(module, FSDPModule) for module in model.modules())
            params = [
                ParamShape(
                    name=name,
                    shape=tuple(p.shape),
                    trainable=p.requires_grad,
                    part=tuple(p.to_local().shape) if isinstance(p, DTensor) and parts else None,
                )
                for name, p in model.named_parameters()
            ]
            blocks = _blocks(model)
        else:
            params = [ParamShape(name=name, shape=tuple(shape)) for name, shape in model.items()]
            blocks = _numbered([*model])
        _check_sizes(params, source)
        return cls(params=tuple(params), blocks=tuple(blocks), source=source)

    def units(
        self,
        world_size: int,
        dtype: torch.dtype,
        parameter_dtype: torch.dtype,
        *,
        ranks_per_host: int = 1,
    ) -> tuple[list[UnitInfo], list[UnitInfo]]:
        """The reduce-scatter of gradients of ``dtype`` and the all-gather of parameters of
        ``parameter_dtype`` of every unit, in the same order, the root first."""
        held: dict[str, list[UnitParam]] = {"": []} | {block: [] for block in self.blocks}
        for param in self.params:
            held[_outermost(param.name, held)].append(_sharded(param, world_size))
        gathers = [
            UnitInfo(
                name=name,
                params=tuple(params),
                world_size=world_size,
                dtype=parameter_dtype,
                per_step=2 if name else 1,
                ranks_per_host=ranks_per_host,
            )
            for name, params in held.items()
            if params
        ]
        reduces = [
            replace(g, params=tuple(p for p in g.params if not p.frozen), dtype=dtype, per_step=1)
            for g in gathers
        ]
        return reduces, gathers

    def replicated_units(
        self, world_size: int, dtype: torch.dtype, *, ranks_per_host: int = 1
    ) -> list[UnitInfo]:
        """The all-reduce of every unit if each rank has the whole model, of ``dtype``, in DDP."""
        named = (
            (p.name, nn.Parameter(torch.empty(p.shape, dtype=dtype, device="meta"), p.trainable))
            for p in self.params
        )
        return planned_units(named, world_size, ranks_per_host)


def _check_sizes(params: Sequence[ParamShape], source: str) -> None:
    where, total = source or "the model", 0
    if len(params) > MAX_TENSORS:
        raise ModelError(f"{where}: {len(params):,} parameters, more than {MAX_TENSORS:,} tensors")
    for param in params:
        if not 0 < len(param.name) <= _LONGEST_NAME or not param.name.isprintable():
            raise ModelError(
                f"{where}: {param.name!r:.80} is not a parameter name: names have 1 to "
                f"{_LONGEST_NAME} printable characters"
            )
        # Check sizes before multiplying: a shape may have thousands, of thousands of digits each.
        sized = all(0 <= size <= MAX_PARAMETERS for size in param.shape) and len(param.shape) <= 16
        total += param.numel if sized else 0
        if not sized or total > MAX_PARAMETERS:
            raise ModelError(
                f"{where}: with {param.name!r:.80} it has more than {MAX_PARAMETERS:.0e} elements "
                "or 16 dimensions, so it is not a model"
            )


def _sharded(param: ParamShape, world_size: int) -> UnitParam:
    # FSDP splits the first dimension, and pads it to a multiple of the ranks.
    first, *rest = (param.part or param.shape) or (1,)
    local = (-(-first // world_size), *rest)
    return UnitParam(
        name=param.name,
        shape=param.shape,
        columns=math.prod(local),
        local=local,
        frozen=not param.trainable,
    )


def _blocks(model: nn.Module) -> list[str]:
    blocks: dict[str, None] = {}
    for name, module in model.named_modules():
        if _outermost(name, blocks):
            continue
        if isinstance(module, nn.ModuleList) and len(module) > 1:
            children = list(module.named_children())
            if len({type(child) for _, child in children}) == 1:
                names = [f"{name}.{child}" if name else child for child, _ in children]
                blocks |= dict.fromkeys(names)
    return [*blocks]


def _outermost(name: str, blocks: Container[str]) -> str:
    """The outermost block that holds the module or parameter ``name``; empty if none does."""
    at = name.find(".")
    while at >= 0:
        if name[:at] in blocks:
            return name[:at]
        at = name.find(".", at + 1)
    return ""


def _numbered(names: Sequence[str]) -> list[str]:
    found: dict[str, dict[str, None]] = {}
    for name in names:
        parts = name.split(".")
        at = next((i for i, part in enumerate(parts[:-1]) if part.isdigit()), None)
        if at is not None:
            found.setdefault(".".join(parts[:at]), {})[".".join(parts[: at + 1])] = None
    return [block for blocks in found.values() if len(blocks) > 1 for block in blocks]


# In published decoder-only models of 1e9 to 1e11 parameters, width / layers is between 64 and 150.
_ASPECT = 120
_LEAST = 100_000


def synthetic(numel: int) -> ModelShapes:
    """A Llama-like decoder of about ``numel`` parameters.

    The MLP is gated and 8/3 as wide as the model. The vocabulary is 32000, or less in small models.
    The head is not tied. The MLP's size absorbs the rounding of width and layers, so the total is
    within 3% of ``numel``.

    Raises:
        ModelError: if ``numel`` is too small for a transformer, or more than any model has.
    """
    if numel > MAX_PARAMETERS // 2:  # the result may be a little larger
        raise ModelError(f"{numel:.3g} parameters are more than {MAX_PARAMETERS / 2:.0e}")
    if numel < _LEAST:
        raise ModelError(
            f"{numel} parameters are too few for a transformer: give {_LEAST:,} or more"
        )
    width = (numel * _ASPECT / 12) ** (1 / 3)
    step = 128 if width > 1024 else 32 if width > 128 else 8
    width = max(step, round(width / step) * step)
    vocabulary = min(32000, max(128, numel // (8 * width) // 32 * 32))
    rest = numel - 2 * vocabulary * width
    layers = max(2, round(rest / (12 * width**2)))
    inner = max(step, round((rest / layers - 4 * width**2) / (3 * width * step)) * step)
    block = {f"self_attn.{name}_proj": (width, width) for name in "qkvo"}
    block |= {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width)}
    block |= {"mlp.down_proj": (width, inner)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, width)}
    for i in range(layers):
        matrices = {f"model.layers.{i}.{name}.weight": shape for name, shape in block.items()}
        norms = (f"model.layers.{i}.{n}_layernorm.weight" for n in ("input", "post_attention"))
        shapes |= matrices | dict.fromkeys(norms, (width,))
    return ModelShapes.of(
        shapes | {"model.norm.weight": (width,), "lm_head.weight": (vocabulary, width)}
    )


_LARGEST = 100_000_000  # bytes of a JSON file, and of a header: the format's limit
_INDEX = "weight_map"  # the key that marks an index of several safetensors files
_MOST = 2**63 - 1  # largest size or offset
_FILE = re.compile(r"[^/\\\x00-\x1f\x7f\ud800-\udfff]{1,240}\.safetensors")
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
