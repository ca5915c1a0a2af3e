"""The digest that detects a damaged state of a rank, in either format."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor

from tagc.checkpoint.sums import sums_of

DIGEST = "digest"
_FORMER = "sha256"  # earlier versions hashed the elements themselves


def with_digest(
    metadata: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    sums: Mapping[str, Tensor] | None = None,
) -> dict[str, str]:
    """The metadata of a rank's tensors, with ``digest``: the SHA-256 of the metadata and of the
    tensors' names, dtypes, shapes and sums.

    Args:
        sums: :func:`tagc.checkpoint.sums.sums_of` of each tensor, on the CPU, if they are known.
    """
    return {**metadata, DIGEST: _digest(metadata, tensors, sums)}


def has_digest(metadata: Mapping[str, str]) -> bool:
    """Whether there is something to compare; not in the first states of torch's checkpoints."""
    return DIGEST in metadata or _FORMER in metadata


def matches_digest(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> bool:
    """Whether metadata and tensors match the digest in the metadata; False without digest."""
    rest = dict(metadata)
    if DIGEST in metadata:
        return rest.pop(DIGEST) == _digest(rest, tensors)
    return rest.pop(_FORMER, None) == _former_digest(rest, tensors)


def _digest(
    metadata: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    sums: Mapping[str, Tensor] | None = None,
) -> str:
    digest = _started(metadata)
    for name, tensor in sorted(tensors.items()):
        digest.update(_described(name, tensor))
        digest.update((sums_of(tensor).cpu() if sums is None else sums[name]).numpy().data)
    return digest.hexdigest()


def _former_digest(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    digest = _started(metadata)
    for name, tensor in sorted(tensors.items()):
        digest.update(_described(name, tensor))
        packed = tensor.detach().cpu().contiguous()
        # A single element counts as contiguous with any stride, but such a stride allows no view.
        content = packed.as_strided((packed.numel(),), (1,)).view(torch.uint8)
        digest.update(content.numpy().data)
    return digest.hexdigest()


def _started(metadata: Mapping[str, str]) -> hashlib._Hash:
    return hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode())


def _described(name: str, tensor: Tensor) -> bytes:
    return json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode()
