"""A policy with rules for dimensions, meshes made with it, and the arithmetic of what arrives."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor

import tagc
from support import oracle


def policy(bits: int = 8, block: int = 64) -> dict[str, Any]:
    """Without bits, codec ``exact``."""
    codec = {"kind": "quantized", "bits": bits, "block": block} if bits else {"kind": "exact"}
    rule = {"codec": codec}
    return {
        "schema": 1,
        "gradients": [{"when": {}, "codec": {"kind": "dense"}}],
        "dimensions": {"tp": rule, "cp": rule, "pp": rule, "ep": rule},
    }


def mesh_of(*shape: int, names: tuple[str, ...] = ("tp",), **codec: Any) -> Any:
    return tagc.init_device_mesh("cpu", shape, mesh_dim_names=names, policy=policy(**codec))


def coded(t: Tensor, bits: int = 8, block: int = 64) -> Tensor:
    """What arrives of ``t``, in float32: each block rounded by itself, unless there are no bits."""
    if not bits:
        return t.float()
    row = oracle.quantize_row(t.detach().float().flatten().numpy(), bits, block)
    return torch.from_numpy(row).float().view(t.shape)


def added(rows: list[Tensor]) -> Tensor:
    """In their order."""
    return reduce(torch.add, rows)
