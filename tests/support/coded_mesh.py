"""A policy with rules for dimensions, and meshes made with it."""

from __future__ import annotations

from typing import Any

import tagc


def policy(bits: int = 8, block: int = 64) -> dict[str, Any]:
    codec = {"kind": "quantized", "bits": bits, "block": block}
    rule = {"codec": codec}
    return {
        "schema": 1,
        "gradients": [{"when": {}, "codec": {"kind": "dense"}}],
        "dimensions": {"tp": rule, "cp": rule, "pp": rule, "ep": rule},
    }


def mesh_of(*shape: int, names: tuple[str, ...] = ("tp",), **codec: Any) -> Any:
    return tagc.init_device_mesh("cpu", shape, mesh_dim_names=names, policy=policy(**codec))
