"""The SHA-256 that detects a damaged state of a rank, in either format."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor

SHA256 = "sha256"


def with_digest(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The metadata of a rank's tensors; ``sha256`` is the digest of metadata and tensors."""
    return {**metadata, SHA256: _digest(metadata, tensors)}


def matches_digest(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> bool:
    """Whether metadata and tensors match the digest in the metadata; False without digest."""
    rest = {name: value for name, value in metadata.items() if name != SHA256}
    return metadata.get(SHA256) == _digest(rest, tensors)


def _digest(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        packed = tensor.detach().cpu().contiguous()
        # A single element counts as contiguous with any stride, but such a stride allows no view.
        content = packed.as_strided((packed.numel(),), (1,)).view(torch.uint8)
        digest.update(content.numpy().data)
    return digest.hexdigest()
