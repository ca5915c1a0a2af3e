"""The SHA-256 that tells whether a rank's state is still what was saved, in either format."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor

SHA256 = "sha256"


def with_digest(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The metadata of a rank's tensors, and under ``sha256`` the digest of both."""
    return {**metadata, SHA256: _digest(metadata, tensors)}


def matches_digest(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> bool:
    """Whether metadata and tensors are those that :func:`with_digest` got; False without digest."""
    rest = {name: value for name, value in metadata.items() if name != SHA256}
    return metadata.get(SHA256) == _digest(rest, tensors)


def _digest(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        packed = tensor.detach().cpu().contiguous()
        # A single element counts as contiguous whatever its stride, with which no view has bytes.
        content = packed.as_strided((packed.numel(),), (1,)).view(torch.uint8)
        digest.update(content.numpy().data)
    return digest.hexdigest()
