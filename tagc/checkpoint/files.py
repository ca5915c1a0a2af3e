"""States in safetensors files: one file per rank, and a marker that names the current save.

A save writes ``rank-00000-of-00002-SAVE.safetensors`` on every rank. When all files are in the
folder and complete, the name of the save is written to the marker ``tagc.json``. The marker is
replaced in one step, and until then the folder keeps its previous state, so a crash at any moment
leaves a whole state. Every file has a digest of its content, so that damaged files are refused.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tagc.checkpoint.digest import DIGEST, matches_digest, with_digest
from tagc.checkpoint.format import FORMAT, StateError, StateHeader, check_together

MARKER = "tagc.json"
_PARTIAL = ".partial"
_LARGEST_MARKER = 1 << 24


def write_rank(
    folder: Path,
    save: str,
    about: StateHeader,
    tensors: dict[str, Tensor],
    sums: Mapping[str, Tensor] | None = None,
) -> str:
    """Write one rank's file and read it again. The file gets its name when it is complete.

    If that fails, the file is removed.

    Args:
        tensors: contiguous, on the CPU.
        sums: as for :func:`tagc.checkpoint.digest.with_digest`.

    Returns:
        The digest of the file's metadata and tensors.

    Raises:
        OSError: if the file cannot be written.
        StateError: if the content that is read differs from what was written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    metadata = with_digest(about.to_strings() | {"save": save}, tensors, sums)
    target = folder / _file_name(about.rank, about.world_size, save)
    partial = target.with_suffix(_PARTIAL)
    try:
        try:
            save_file(tensors, partial, metadata)
        except SafetensorError as error:  # safetensors wraps the system's error
            raise OSError(f"{partial}: {error}") from error
        _ = _RankFile(partial).tensors  # reading checks them
        _replace(partial, target)
    except BaseException:
        remove_rank(folder, save, about.rank, about.world_size)
        raise
    return metadata[DIGEST]


def remove_rank(folder: Path, save: str, rank: int, world_size: int) -> None:
    """Remove the files of :func:`write_rank`, as far as the system allows. Leftovers are ignored,
    and the next save removes them."""
    target = folder / _file_name(rank, world_size, save)
    for file in (target, target.with_suffix(_PARTIAL)):
        with suppress(OSError):
            file.unlink(missing_ok=True)


def check_save(folder: Path, save: str, digests: Mapping[int, str], world_size: int) -> None:
    """Check that the files of all ranks are in the folder, complete, and of one save.

    This reads every file's header, which must fit the file's size and state the digest that its
    rank found. It does not read the content again: each rank did that in :func:`write_rank`.

    Args:
        digests: the digest that :func:`write_rank` returned, by rank.

    Raises:
        StateError: if a file is missing, or is not the one that its rank wrote.
    """
    for rank in digests:
        name = _file_name(rank, world_size, save)
        if not (folder / name).exists():
            raise StateError(
                f"{folder}: {name}, which rank {rank} wrote, is not in it: the ranks do not share "
                "this folder"
            )
    files = _open_files(folder, save, list(digests), world_size)
    for rank, file in files.items():
        if file.metadata.get(DIGEST) != digests[rank]:
            raise StateError(f"{file.path}: not the file that rank {rank} wrote")
    check_together({rank: file.header for rank, file in files.items()}, str(folder))


def commit(folder: Path, save: str, ranks: Sequence[int], world_size: int) -> None:
    """Make a save, whose files are complete, the folder's state.

    Raises:
        OSError: if that fails.
    """
    said = {"format": FORMAT, "save": save, "ranks": list(ranks), "world_size": world_size}
    write_marker(folder, json.dumps(said).encode())


def read_marker(folder: Path) -> bytes | None:
    """The marker's content, unchecked; None if there is no marker."""
    try:
        return (folder / MARKER).read_bytes()
    except FileNotFoundError:
        return None


def write_marker(folder: Path, content: bytes | None) -> None:
    """Replace the marker in one step; None removes it.

    Raises:
        OSError: if that fails.
    """
    if content is None:
        (folder / MARKER).unlink(missing_ok=True)
        return
    partial = folder / f"{MARKER}{_PARTIAL}"
    try:
        partial.write_bytes(content)
        _replace(partial, folder / MARKER)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def is_committed(folder: Path, save: str) -> bool:
    """Whether a save is the folder's state."""
    return (folder / MARKER).exists() and _parse_marker(folder / MARKER)["save"] == save


def clean(folder: Path, save: str) -> None:
    """Remove the files of other saves.

    Raises:
        OSError: if that fails.
    """
    for file in folder.iterdir():
        found = re.fullmatch(r"rank-\d+-of-\d+-([0-9a-f]+)\.(safetensors|partial)", file.name)
        if found and found[1] != save:
            file.unlink(missing_ok=True)


class SafetensorsFolder:
    """The :class:`tagc.checkpoint.format.Source` of such a folder."""

    alone = False

    def __init__(self, folder: Path) -> None:
        """Read the marker and the files' headers.

        Raises:
            StateError: if a file is missing or not valid.
        """
        self.where = str(folder)
        said = _parse_marker(folder / MARKER)
        self.save = said["save"]
        self._files = _open_files(folder, self.save, said["ranks"], said["world_size"])
        self._headers = {rank: file.header for rank, file in self._files.items()}
        self.identity = f"save {self.save}, {check_together(self._headers, self.where)}"

    def headers(self) -> Mapping[int, StateHeader]:
        return self._headers

    def shapes(self, rank: int) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        return self._files[rank].shapes

    def read(self, rank: int, name: str) -> Tensor:
        return self._files[rank].tensors[name]


def _open_files(
    folder: Path, save: str, ranks: Iterable[int], world_size: int
) -> dict[int, _RankFile]:
    files = {rank: _RankFile(folder / _file_name(rank, world_size, save)) for rank in ranks}
    for file in files.values():
        if file.metadata.get("save") != save:
            raise StateError(f"{file.path}: not a file of save {save}, as its name says")
    return files


class _RankFile:
    """One rank's file. Its tensors are read and checked on first use."""

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
        """All tensors of the file, by name."""
        try:
            with self._open() as file:
                tensors = {name: file.get_tensor(name) for name in self.shapes}
        except _UNREADABLE as error:
            raise StateError(f"{self.path}: not a safetensors file: {error}") from None
        if not matches_digest(self.metadata, tensors):
            raise StateError(f"{self.path}: damaged: its content is not what was written")
        return tensors

    def _open(self) -> Any:
        try:
            return safe_open(self.path, framework="pt")
        except FileNotFoundError:
            raise StateError(f"{self.path}: there is no such file") from None


# Raised for bytes that are not a safetensors file.
_UNREADABLE = (SafetensorError, OSError)
# safetensors' names of the dtypes that states have.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}


def _parse_marker(path: Path) -> dict[str, Any]:
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
        raise StateError(f"{path}: save is {save!r:.40}, not the name of a save")
    if type(world_size) is not int or not 0 < world_size < 10**9:
        raise StateError(f"{path}: world_size is {world_size!r:.40}, not a number of ranks")
    if (
        not isinstance(ranks, list)
        or not ranks
        or not all(type(rank) is int and 0 <= rank < world_size for rank in ranks)
        or sorted(set(ranks)) != ranks
    ):
        raise StateError(f"{path}: ranks is {ranks!r:.40}, not an ascending list of ranks")
    return said


def _file_name(rank: int, world_size: int, save: str) -> str:
    return f"rank-{rank:05d}-of-{world_size:05d}-{save}.safetensors"


def _replace(partial: Path, target: Path) -> None:
    """Rename a file so that, even after a power cut, the target has its old or its new content,
    and all of it."""
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
