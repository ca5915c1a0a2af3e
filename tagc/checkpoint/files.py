"""States in safetensors files: one file per rank, and a marker that names the current save.

A save writes ``rank-00000-of-00002-SAVE.safetensors`` on every rank. When all files are in the
folder and complete, the name of the save is written to the marker ``tagc.json``. The marker is
replaced in one step, and until then the folder keeps its previous state, so a crash at any moment
leaves a whole state. Every file has a digest of its content, so that damaged files are refused.

States in a checkpoint of ``torch.distributed.checkpoint`` are read without its collectives. torch
loads only the names in a state dict, which are those of the ranks that load. To take over residuals
of other ranks, or of another policy, tagc must see all names first. They are in the checkpoint's
index, a pickle, of which the unpickler here allows only the classes that torch writes to an index.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from pydantic import (
    BaseModel,
    Field,
    NonNegativeInt,
    StringConstraints,
    ValidationError,
    model_validator,
)
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from tagc.basics.files import read_regular
from tagc.basics.warn import warn
from tagc.checkpoint.format import (
    DENSE,
    DIGEST,
    FORMAT,
    RankState,
    Source,
    StateError,
    StateHeader,
    first_problem,
    metadata_from_tensor,
    split_names,
    with_digest,
)
from tagc.checkpoint.state import State
from tagc.collect import Meeting, gather_by_rank

MARKER = "tagc.json"
_PARTIAL = ".partial"
_LARGEST_MARKER = 1 << 24


def open_folder(folder: Path, key: str) -> Source:
    """The state that was saved to a folder, in either format; ``key`` is the compressor's in a
    ``torch.distributed.checkpoint``. Raises StateError if there is no complete and valid one."""
    if (folder / MARKER).exists():
        return open_files(folder)
    if (folder / INDEX).exists():
        return open_checkpoint(folder, key)
    raise StateError(
        f"{folder}: holds no complete save: neither {MARKER}, from compressor.save, nor {INDEX}, "
        f"from torch.distributed.checkpoint. {DENSE}"
    )


def save_folder(folder: Path, state: State) -> None:
    """Write every rank's file, then commit them as the folder's state.

    If a step fails on any rank, all ranks raise, and the folder keeps its previous state. All ranks
    take every step together, so no rank is left waiting for another. They meet over the store of
    the process group, because a collective's watchdog might end the job while files are written.

    1. Every rank writes its file and reads it again.
    2. The first rank checks that the files of all ranks are in its folder, so all share it.
    3. It writes the name of this save into the marker.

    Only then does it remove the files of earlier saves.

    Raises:
        OSError: if writing fails.
        StateError: if the ranks do not share the folder.
        RuntimeError: if that happened on another rank.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    names = gather_by_rank(state.groups, {rank: uuid.uuid4().hex[:16]})
    ranks = sorted(names)
    save, commits = names[ranks[0]], rank == ranks[0]

    remedy = "All ranks must save between the same two steps"
    meeting = Meeting(f"save {save}", ranks, doing="saving tagc's state", remedy=remedy)

    def write() -> str:
        return write_rank(folder, save, state.header(), *state.take())

    def check_and_commit() -> None:
        if commits:
            check_save(folder, save, digests, world_size)
            commit(folder, save, ranks, world_size)

    def check_unnamed() -> None:
        if commits and (folder / MARKER).exists() and read_marker(folder).save == save:
            raise StateError(f"{MARKER} names them")

    try:
        digests = meeting.together(f"writing step {state.step}", write)
        meeting.together("committing", check_and_commit)
    except Exception as error:
        try:
            meeting.together("undoing", check_unnamed)
        except Exception as failure:
            # The marker may name these files, so they stay.
            error.add_note(f"the files of this save are left in {folder}: {failure}")
        else:
            with suppress(OSError):  # the next save removes leftovers
                (folder / _file_name(rank, world_size, save)).unlink(missing_ok=True)
        raise
    if commits:
        try:
            clean(folder, save)
        except OSError as error:
            warn(f"{folder}: files of earlier saves are left in it: {error}")


def write_rank(
    folder: Path,
    save: str,
    about: StateHeader,
    tensors: dict[str, Tensor],
    sums: Mapping[str, Tensor] | None = None,
) -> str:
    """Write one rank's file of ``tensors``, contiguous on the CPU, and read it again; returns the
    digest of its metadata and tensors. The file gets its name when it is complete, and is removed
    if that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    metadata = with_digest(about.to_strings() | {"save": save}, tensors, sums)
    with _replacing(folder / _file_name(about.rank, about.world_size, save)) as partial:
        try:
            save_file(tensors, partial, metadata)
        except SafetensorError as error:  # safetensors wraps the system's error
            raise OSError(f"{partial}: {error}") from error
        _ = _open_file(partial).tensors  # reading checks them
    return metadata[DIGEST]


def check_save(folder: Path, save: str, digests: Mapping[int, str], world_size: int) -> None:
    """Check that the files of all ranks are in the folder, complete, and of one save.

    This reads every file's header, which must fit the file's size and state the digest that
    :func:`write_rank` returned on its rank. Each rank has read the content again there.
    """
    for rank in digests:
        name = _file_name(rank, world_size, save)
        if not (folder / name).exists():
            raise StateError(
                f"{folder}: {name}, which rank {rank} wrote, is not in it: the ranks do not share "
                "this folder"
            )
    files = _open_files(folder, save, list(digests), world_size)
    for rank, file in files.ranks.items():
        if file.metadata.get(DIGEST) != digests[rank]:
            raise StateError(f"{file.where}: not the file that rank {rank} wrote")


def commit(folder: Path, save: str, ranks: Sequence[int], world_size: int) -> None:
    """Replace the marker in one step."""
    marker = _Marker(save=save, ranks=list(ranks), world_size=world_size)
    with _replacing(folder / MARKER) as partial:
        partial.write_text(marker.model_dump_json())


def clean(folder: Path, save: str) -> None:
    for file in folder.iterdir():
        found = re.fullmatch(r"rank-\d+-of-\d+-([0-9a-f]+)\.(safetensors|partial)", file.name)
        if found and found[1] != save:
            file.unlink(missing_ok=True)


def open_files(folder: Path) -> Source:
    marker = read_marker(folder)
    return _open_files(folder, marker.save, marker.ranks, marker.world_size)


def _open_files(folder: Path, save: str, ranks: Iterable[int], world_size: int) -> Source:
    states = {rank: _open_file(folder / _file_name(rank, world_size, save)) for rank in ranks}
    for state in states.values():
        if state.metadata.get("save") != save:
            raise StateError(f"{state.where}: not a file of save {save}, as its name says")
    return Source(str(folder), states, f"save {save}, ")


def _open_file(path: Path) -> RankState:
    shapes = {}
    with _opened(path) as file:
        metadata: dict[str, str] = file.metadata() or {}
        for name in file.keys():  # noqa: SIM118
            found = file.get_slice(name)
            dtype = _DTYPES.get(found.get_dtype())
            if dtype is None:
                raise StateError(
                    f"{path}: {name} has dtype {found.get_dtype()}, which no state has"
                )
            shapes[name] = dtype, tuple(found.get_shape())

    def read() -> dict[str, Tensor]:
        with _opened(path) as file:
            return {name: file.get_tensor(name) for name in shapes}

    return RankState(str(path), metadata, shapes, read)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise StateError(f"{path}: there is no such file") from None
    except (SafetensorError, OSError) as error:
        raise StateError(f"{path}: not a safetensors file: {error}") from None


# safetensors' names of the dtypes that states have.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}


class _Marker(BaseModel, strict=True):
    format: Literal[1] = FORMAT
    save: Annotated[str, StringConstraints(pattern="^[0-9a-f]{8,64}$")]
    ranks: Annotated[list[NonNegativeInt], Field(min_length=1)]
    world_size: Annotated[int, Field(lt=10**9)]

    @model_validator(mode="after")
    def _check(self) -> _Marker:
        if sorted({*self.ranks, self.world_size}) != [*self.ranks, self.world_size]:
            raise ValueError("not an ascending list of ranks")
        return self


def read_marker(folder: Path) -> _Marker:
    path = folder / MARKER
    try:
        return _Marker.model_validate_json(read_regular(path, _LARGEST_MARKER))
    except OSError as error:
        raise StateError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValidationError as error:
        raise StateError(f"{path}: not a marker of tagc: {first_problem(error)}") from None


def _file_name(rank: int, world_size: int, save: str) -> str:
    return f"rank-{rank:05d}-of-{world_size:05d}-{save}.safetensors"


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """A file to write, which is then renamed so that, even after a power cut, the target has its
    old or its new content, and all of it. It is removed, as far as the system allows, if that
    fails."""
    partial = target.with_suffix(_PARTIAL)
    try:
        yield partial
        _flush(partial)
        os.replace(partial, target)
        _flush(target.parent)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


INDEX = ".metadata"
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "_MEM_FORMAT_ENCODING",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
}


def open_checkpoint(folder: Path, key: str) -> Source:
    """The states in such a folder; ``key`` is the compressor's in the state dict that was saved."""
    where = f"{folder} ({key!r})"
    index = _Index(folder, where)
    start = f"{key}."
    saved = [name for name in index.entries if isinstance(name, str)]
    names = [name.removeprefix(start) for name in saved if name.startswith(start)]
    if not names:
        raise StateError(
            f"{folder}: nothing in this checkpoint is called {key!r}; pass the compressor's "
            f"key in the saved state dict, load(..., key=...). {DENSE}"
        )
    ranks: dict[int, RankState] = {}
    for rank, own in split_names(names, where).items():
        here = f"{where}, rank {rank}"
        about = metadata_from_tensor(index.load(start + own.pop("")), here)
        full = {name: start + end for name, end in own.items()}
        shapes = {name: index.shape(of) for name, of in full.items()}
        ranks[rank] = RankState(here, about, shapes, partial(index.load_all, full))
    return Source(where, ranks)


class _Index:
    def __init__(self, folder: Path, where: str) -> None:
        self._folder, self._where = folder, where
        path = folder / INDEX
        try:
            with path.open("rb") as file:
                index = _Unpickler(file).load()
            self.entries, self._storage = dict(index.state_dict_metadata), dict(index.storage_data)
        except OSError as error:
            raise StateError(f"{path}: cannot be read: {error.strerror or error}") from None
        except StateError:
            raise
        except Exception as error:  # damaged bytes can raise anything in pickle
            raise StateError(f"{path}: not an index of a checkpoint: {error}") from None

    def load_all(self, names: Mapping[str, str]) -> dict[str, Tensor]:
        return {name: self.load(full) for name, full in names.items()}

    def load(self, name: str) -> Tensor:
        dtype, shape = self.shape(name)
        try:
            stored = self._storage[MetadataIndex(name, torch.Size([0] * len(shape)))]
            if stored.transform_descriptors:
                raise StateError(f"{self._where}: {name} is stored with an extension of torch's")
            # Only the file's name, so that nothing outside the folder is read.
            with (self._folder / Path(stored.relative_path).name).open("rb") as file:
                file.seek(stored.offset)
                content = file.read(stored.length)
            tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except StateError:
            raise
        except Exception as error:  # damaged bytes can raise anything in torch's reader
            raise StateError(f"{self._where}: {name} cannot be read: {error}") from None
        if not isinstance(tensor, Tensor) or (tensor.dtype, (*tensor.shape,)) != (dtype, shape):
            raise StateError(f"{self._where}: {name} is not what the checkpoint's index says")
        return tensor

    def shape(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        entry = self.entries[name]
        # A damaged index may lack any of these attributes.
        size, properties = (getattr(entry, part, None) for part in ("size", "properties"))
        dtype = getattr(properties, "dtype", None)
        if not isinstance(entry, TensorStorageMetadata) or not (
            isinstance(size, torch.Size) and isinstance(dtype, torch.dtype)
        ):
            raise StateError(f"{self._where}: {name} is not a tensor")
        return dtype, tuple(size)


class _Unpickler(pickle.Unpickler):
    """Creates only objects of the classes that an index consists of."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        if global_name in _CLASSES.get(module_name, ()):
            return super().find_class(module_name, global_name)
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            return getattr(torch, global_name)
        raise StateError(
            f"the checkpoint's index names {module_name}.{global_name}, which torch does not "
            "write to an index: nothing was loaded"
        )
