"""Reads states in a checkpoint of ``torch.distributed.checkpoint``, without its collectives.

torch loads only the names in a state dict, which are those of the ranks that load. To take over the
residuals of other ranks, or of another policy, tagc must see all names first. They are in the
checkpoint's index, which is a pickle. The unpickler here allows only the classes that torch writes
to an index.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from tagc.checkpoint.format import (
    DENSE,
    RankState,
    Source,
    StateError,
    metadata_from_tensor,
    split_names,
)

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
    """A checkpoint's index: where the tensors are in its files."""

    def __init__(self, folder: Path, where: str) -> None:
        index = _read_index(folder / INDEX)
        self._folder, self._where = folder, where
        self.entries, self._storage = index.state_dict_metadata, index.storage_data
        if not isinstance(self.entries, dict) or not isinstance(self._storage, dict):
            raise StateError(f"{folder / INDEX}: not an index of a checkpoint")

    def load_all(self, names: Mapping[str, str]) -> dict[str, Tensor]:
        """Tensors by other names."""
        return {name: self.load(full) for name, full in names.items()}

    def load(self, name: str) -> Tensor:
        """A tensor, on the CPU."""
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
        """A tensor's dtype and shape."""
        entry = self.entries[name]
        # A damaged index may lack any of these attributes.
        size, properties = (getattr(entry, part, None) for part in ("size", "properties"))
        dtype = getattr(properties, "dtype", None)
        if not isinstance(entry, TensorStorageMetadata) or not (
            isinstance(size, torch.Size) and isinstance(dtype, torch.dtype)
        ):
            raise StateError(f"{self._where}: {name} is not a tensor")
        return dtype, tuple(size)


def _read_index(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            index = _Unpickler(file).load()
    except OSError as error:
        raise StateError(f"{path}: cannot be read: {error.strerror or error}") from None
    except StateError:
        raise
    except Exception as error:  # damaged bytes can raise anything in pickle
        raise StateError(f"{path}: not an index of a checkpoint: {error}") from None
    if not hasattr(index, "state_dict_metadata") or not hasattr(index, "storage_data"):
        raise StateError(f"{path}: not an index of a checkpoint")
    return index


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
