"""A policy with rules for dimensions, meshes made with it, and the arithmetic of what arrives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

import tagc


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
    flat = t.float().reshape(-1)
    blocks = pad(flat, (0, -flat.numel() % block)).view(-1, block)
    levels = 2 ** (bits - 1) - 1
    scale = (blocks.abs().amax(1) * torch.tensor(1 / levels)).bfloat16().float()[:, None]
    codes = (blocks * (1 / scale)).clamp(-levels, levels).round()
    return (codes * scale).view(-1)[: flat.numel()].view(t.shape)


def added(rows: list[Tensor]) -> Tensor:
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total
