"""What training itself needs of a rank's memory: FSDP and an optimizer, by a model's shapes."""

from __future__ import annotations

import torch

from tagc.costs.shapes import ModelShapes

STATE_BYTES = 16
"""Of a parameter, sharded: itself, its gradient and the two moments of Adam, in float32."""


def training_bytes(
    shapes: ModelShapes, ranks: int, dtype: torch.dtype, parameter_dtype: torch.dtype
) -> int:
    """Bytes of a rank without activations: the sharded state, and, unsharded, the parameters of the
    root and of two blocks (one is gathered ahead), and the gradients of one, as FSDP has them and
    in the buffer that it reduces.

    Args:
        ranks: that share a copy of the model.
        dtype: of the gradients that FSDP reduces.
        parameter_dtype: of the parameters that it gathers.
    """
    sizes = dict.fromkeys(("", *shapes.blocks), 0)
    for param in shapes.params:
        block = next((b for b in shapes.blocks if param.name.startswith(f"{b}.")), "")
        sizes[block] += param.numel
    root = sizes.pop("")
    gathered = root + sum(sorted(sizes.values(), reverse=True)[:2])
    reduced = max(root, *sizes.values()) if sizes else root
    state = STATE_BYTES * -(-shapes.numel // ranks)
    moment = gathered * parameter_dtype.itemsize
    return state + moment + reduced * (parameter_dtype.itemsize + dtype.itemsize)
