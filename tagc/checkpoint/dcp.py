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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from tagc.checkpoint.format import (
    DENSE,
    StateError,
    StateHeader,
    check_digest,
    check_together,
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


class CheckpointFolder:
    """The :class:`tagc.checkpoint.format.Source` of such a folder."""

    alone = False

    def __init__(self, folder: Path, key: str) -> None:
        """Read the index and the header of every rank's state.

        Args:
            key: the compressor's key in the state dict that was saved.

        Raises:
            StateError: if there is no valid state.
        """
        self.where = f"{folder} ({key!r})"
        self._folder = folder
        index = _read_index(folder / INDEX)
        self._entries, self._storage = index.state_dict_metadata, index.storage_data
        if not isinstance(self._entries, dict) or not isinstance(self._storage, dict):
            raise StateError(f"{folder / INDEX}: not an index of a checkpoint")
        start = f"{key}."
        saved = [name for name in self._entries if isinstance(name, str)]
        names = [name.removeprefix(start) for name in saved if name.startswith(start)]
        if not names:
            raise StateError(
                f"{folder}: nothing in this checkpoint is called {key!r}; pass the compressor's "
                f"key in the saved state dict, load(..., key=...). {DENSE}"
            )
        self._names = {
            rank: {name: start + full for name, full in own.items()}
            for rank, own in split_names(names, self.where).items()
        }
        self._metadata = {
            rank: metadata_from_tensor(self._load(own[""]), self._where_of(rank))
            for rank, own in self._names.items()
        }
        self._headers = {
            rank: StateHeader.from_strings(metadata, self._where_of(rank))
            for rank, metadata in self._metadata.items()
        }
        self._checked: dict[int, dict[str, Tensor]] = {}
        self.identity = check_together(self._headers, self.where)

    def headers(self) -> Mapping[int, StateHeader]:
        return self._headers

    def shapes(self, rank: int) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        found = {name: self._entry(full) for name, full in self._names[rank].items() if name}
        return {name: (t.properties.dtype, tuple(t.size)) for name, t in found.items()}

    def read(self, rank: int, name: str) -> Tensor:
        """See :class:`tagc.checkpoint.format.Source`. The first read of a rank reads and checks all
        of its tensors."""
        if rank not in self._checked:
            own = self._names[rank]
            tensors = {name: self._load(full) for name, full in own.items() if name}
            check_digest(self._metadata[rank], tensors, self._where_of(rank))
            self._checked[rank] = tensors
        return self._checked[rank][name]

    def _where_of(self, rank: int) -> str:
        return f"{self.where}, rank {rank}"

    def _load(self, full: str) -> Tensor:
        expected = self._entry(full)
        try:
            stored = self._storage[MetadataIndex(full, torch.Size([0] * len(expected.size)))]
            if stored.transform_descriptors:
                raise StateError(f"{self.where}: {full} is stored with an extension of torch's")
            # Only the file's name, so that nothing outside the folder is read.
            with (self._folder / Path(stored.relative_path).name).open("rb") as file:
                file.seek(stored.offset)
                content = file.read(stored.length)
            tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except StateError:
            raise
        except Exception as error:  # damaged bytes can raise anything in torch's reader
            raise StateError(f"{self.where}: {full} cannot be read: {error}") from None
        found = (tensor.dtype, tensor.shape) if isinstance(tensor, Tensor) else None
        if found != (expected.properties.dtype, expected.size):
            raise StateError(f"{self.where}: {full} is not what the checkpoint's index says")
        return tensor

    def _entry(self, full: str) -> TensorStorageMetadata:
        found = self._entries[full]
        # A damaged index may lack any of these attributes.
        size, properties = (getattr(found, name, None) for name in ("size", "properties"))
        dtype = getattr(properties, "dtype", None)
        if not isinstance(found, TensorStorageMetadata) or not (
            isinstance(size, torch.Size) and isinstance(dtype, torch.dtype)
        ):
            raise StateError(f"{self.where}: {full} is not a tensor")
        return found


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
