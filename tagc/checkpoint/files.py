"""States in plain safetensors files: one a rank, and one that says which belong together.

A save writes ``rank-00000-of-00002-SAVE.safetensors`` on every rank, and then, when all are there,
``tagc.json`` with the name of the save. Until that one is replaced, in one step, the folder holds
what it held before: a crash at any moment leaves a whole state. Every file has a SHA-256 of all it
says, so that a damaged one is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tagc.checkpoint.format import FORMAT, StateError, StateHeader, check_together

MARKER = "tagc.json"
_LARGEST_MARKER = 1 << 24


def write_rank(folder: Path, save: str, about: StateHeader, tensors: Mapping[str, Tensor]) -> None:
    """Write one rank's file, under its name only when it is complete.

    Raises:
        OSError: if that fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = about.to_strings() | {"save": save}
    metadata["sha256"] = _digest(metadata, tensors)
    target = folder / _file_name(about.rank, about.world_size, save)
    partial = target.with_suffix(".partial")
    try:
        save_file(tensors, partial, metadata)
    except SafetensorError as error:  # how it reports what the system said
        raise OSError(f"{partial}: {error}") from error
    _replace(partial, target)


def commit(folder: Path, save: str, ranks: Sequence[int], world_size: int) -> None:
    """Make a save, whose files are all there, the one that the folder holds."""
    said = {"format": FORMAT, "save": save, "ranks": list(ranks), "world_size": world_size}
    partial = folder / f"{MARKER}.partial"
    partial.write_text(json.dumps(said))
    _replace(partial, folder / MARKER)


def is_committed(folder: Path, save: str) -> bool:
    """Whether a save is what the folder holds."""
    return (folder / MARKER).exists() and _read_marker(folder / MARKER)["save"] == save


def clean(folder: Path, save: str) -> None:
    """Remove the files of other saves."""
    for file in folder.iterdir():
        found = re.fullmatch(r"rank-\d+-of-\d+-([0-9a-f]+)\.(safetensors|partial)", file.name)
        if found and found[1] != save:
            file.unlink(missing_ok=True)


class SafetensorsFolder:
    """A :class:`tagc.checkpoint.format.Source` in such a folder."""

    alone = False

    def __init__(self, folder: Path) -> None:
        """Read what the files say about themselves.

        Raises:
            StateError: if one is missing or not valid.
        """
        self.where = str(folder)
        said = _read_marker(folder / MARKER)
        self.save = said["save"]
        self._files = {
            rank: _RankFile(folder / _file_name(rank, said["world_size"], self.save))
            for rank in said["ranks"]
        }
        for file in self._files.values():
            if file.metadata.get("save") != self.save:
                raise StateError(f"{file.path}: not a file of save {self.save}, as its name says")
        self._headers = {rank: file.header for rank, file in self._files.items()}
        self.identity = f"save {self.save}, {check_together(self._headers, self.where)}"

    def headers(self) -> Mapping[int, StateHeader]:
        """See :class:`tagc.checkpoint.format.Source`."""
        return self._headers

    def shapes(self, rank: int) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        """See :class:`tagc.checkpoint.format.Source`."""
        return self._files[rank].shapes

    def read(self, rank: int, name: str) -> Tensor:
        """See :class:`tagc.checkpoint.format.Source`."""
        return self._files[rank].tensors[name]


class _RankFile:
    """One rank's file; its tensors are read, and checked, when they are first asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with self._open() as file:
                self.metadata: dict[str, str] = file.metadata() or {}
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                found = {n: (s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()}
        except _UNREADABLE as error:
            raise StateError(f"{path}: not a safetensors file: {error}") from None
        self.header = StateHeader.from_strings(self.metadata, str(path))
        for name, (dtype, _) in found.items():
            if dtype not in _DTYPES:
                raise StateError(f"{path}: {name} has dtype {dtype}, which no state has")
        self.shapes = {name: (_DTYPES[dtype], shape) for name, (dtype, shape) in found.items()}

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """All of them."""
        try:
            with self._open() as file:
                tensors = {name: file.get_tensor(name) for name in self.shapes}
        except _UNREADABLE as error:
            raise StateError(f"{self.path}: not a safetensors file: {error}") from None
        metadata = {name: said for name, said in self.metadata.items() if name != "sha256"}
        if _digest(metadata, tensors) != self.metadata.get("sha256"):
            raise StateError(f"{self.path}: damaged: its content is not what was written")
        return tensors

    def _open(self) -> Any:
        try:
            return safe_open(self.path, framework="pt")
        except FileNotFoundError:
            raise StateError(f"{self.path}: there is no such file") from None


# What is raised for bytes that are no safetensors file.
_UNREADABLE = (SafetensorError, OSError)
# As safetensors spells the dtypes that states have.
_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}


def _read_marker(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(_LARGEST_MARKER)
        said = json.loads(text.decode())
    except OSError as error:
        raise StateError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise StateError(f"{path}: not JSON") from None
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        raise StateError(f"{path}: not written in format {FORMAT} of tagc's states")
    save, ranks, world_size = (said.get(name) for name in ("save", "ranks", "world_size"))
    if not isinstance(save, str) or not re.fullmatch("[0-9a-f]{8,64}", save):
        raise StateError(f"{path}: save is {save!r:.40}, no name of one")
    if type(world_size) is not int or not 0 < world_size < 10**9:
        raise StateError(f"{path}: world_size is {world_size!r:.40}, no number of ranks")
    if (
        not isinstance(ranks, list)
        or not ranks
        or not all(type(rank) is int and 0 <= rank < world_size for rank in ranks)
        or sorted(set(ranks)) != ranks
    ):
        raise StateError(f"{path}: ranks is {ranks!r:.40}, no ascending list of ranks")
    return said


def _file_name(rank: int, world_size: int, save: str) -> str:
    return f"rank-{rank:05d}-of-{world_size:05d}-{save}.safetensors"


def _digest(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _replace(partial: Path, target: Path) -> None:
    """Rename, so that after a power cut, too, the name has either content, and all of it."""
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(partial, target)
    descriptor = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
