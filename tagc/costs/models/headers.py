"""Shapes from the headers of safetensors files. A header is a length in 8 bytes and that many bytes
of JSON (https://github.com/huggingface/safetensors, "Format"). The rest of a file is not read."""

from __future__ import annotations

import json
import re
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tagc.basics.files import open_regular, read_regular
from tagc.costs.shapes import ModelError, ModelShapes, check_name

INDEX = "weight_map"
"""The key that marks an index of several files."""
_LONGEST_HEADER = 100_000_000  # the format's limit
_LARGEST_INDEX = 100_000_000
_MOST = 2**63 - 1  # largest size or offset
_FILE = re.compile(r"[^/\\\x00-\x1f\x7f\ud800-\udfff]{1,240}\.safetensors")
_TRAINED = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class _Tensor:
    dtype: str
    shape: tuple[int, ...]
    size: int  # bytes


def from_file(path: Path) -> ModelShapes:
    """Read a model in one file.

    Raises:
        ModelError: if the file is not valid, or most of it is not floating point.
    """
    return _shapes(_read(path), path.name)


def from_index(path: Path, index: Mapping[str, Any]) -> ModelShapes:
    """Read a model in several files. An index maps its tensors to files.

    Args:
        index: the content of ``path``.

    Raises:
        ModelError: if the index is not valid, if a file is missing or lacks a tensor that the index
            names, or as in :func:`from_file`.
    """
    where = index.get(INDEX)
    if (
        not isinstance(where, dict)
        or not where
        or not all(isinstance(f, str) for f in where.values())
    ):
        raise ModelError(f"{path}: {INDEX} is not an object of tensor names and their files")
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


def from_folder(folder: Path) -> ModelShapes | None:
    """Read the model in a folder of safetensors files; None if the folder has none.

    Raises:
        ModelError: if there are several models, or as in :func:`from_index`.
    """
    indices, files = (sorted(folder.glob(f"*.safetensors{s}")) for s in (".index.json", ""))
    named = [folder / f"model.safetensors{suffix}" for suffix in (".index.json", "")]
    found = [path for path in named if path in (*indices, *files)] or indices or files
    if not found:
        return None
    if len(found) > 1 and found[0] not in named:
        names = ", ".join(path.name for path in found[:3])
        raise ModelError(
            f"{folder} has several safetensors files without an index: name one ({names})"
        )
    if found[0].suffix == ".safetensors":
        return from_file(found[0])
    try:
        content = read_regular(found[0], _LARGEST_INDEX)
    except OSError as error:
        raise ModelError(f"cannot read {found[0]}: {error.strerror or error}") from None
    return from_index(found[0], _parse(content, found[0]))


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
    said = f"{source}, {'/'.join(dtype for dtype, _ in dtypes.most_common())}"
    if left:
        said += f", without {left} tensors that are not floating point"
    # The order of parameters in modules decides which are adjacent in FSDP's buffers. Files do not
    # record it, so bytes may differ from the model's by a block here or there.
    names = sorted(trained, key=_numbers_as_such)
    return ModelShapes.of({name: trained[name].shape for name in names}, said)


def _numbers_as_such(name: str) -> list[tuple[int, str]]:
    """A sort key that puts ``layers.2`` before ``layers.10``."""
    parts = re.split("([0-9]+)", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _read(path: Path) -> dict[str, _Tensor]:
    try:
        with open_regular(path) as file:
            start = file.read(8)
            if start == b"version ":
                raise ModelError(f"{path} is a git-lfs pointer, not the file: run git lfs pull")
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else _LONGEST_HEADER + 1
            content = file.read(length) if length <= _LONGEST_HEADER else b""
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from None
    if len(content) != length:
        raise ModelError(
            f"{path} is not a safetensors file, or truncated: its header is incomplete"
        )
    header = _parse(content, path)
    header.pop("__metadata__", None)
    for name in header:
        check_name(name, str(path))
    return {name: _tensor(said, name, path) for name, said in header.items()}


def _parse(content: bytes, path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not a safetensors file or index: {error}") from None
    if not isinstance(parsed, dict) or not parsed:
        raise ModelError(f"{path} names no tensors")
    return parsed


def _tensor(said: Any, name: str, path: Path) -> _Tensor:
    wrong = ModelError(f"{path}: {name!r:.80} has no valid dtype, shape and offsets")
    try:
        shape, (begin, end), dtype = tuple(said["shape"]), said["data_offsets"], said["dtype"]
    except (TypeError, KeyError, ValueError):
        raise wrong from None
    numbers = (*shape, begin, end)
    if not isinstance(dtype, str) or any(
        type(n) is not int or not 0 <= n <= _MOST for n in numbers
    ):
        raise wrong
    if end < begin:
        raise wrong
    return _Tensor(dtype, shape, end - begin)
