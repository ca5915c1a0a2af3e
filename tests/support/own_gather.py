"""A parameter that makes its own data for FSDP2's all-gather, as in torchao's float8 training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

# FSDP and optimizers need results of the same class from these functions.
_KEPT = {
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_zeros.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.copy_.default,
    torch.ops.aten.view.default,
    torch.ops.aten.as_strided.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten._pin_memory.default,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.clone.default,
    torch.ops.aten.detach.default,
}


class InBfloat16(Tensor):
    """Stored unchanged, gathered in bfloat16, and computed with in its own dtype."""

    data_: Tensor

    @staticmethod
    def __new__(cls, data: Tensor) -> InBfloat16:
        made = torch.Tensor._make_wrapper_subclass(
            cls, data.shape, data.stride(), data.storage_offset(), dtype=data.dtype
        )
        made.data_ = data
        return made

    def __repr__(self, **_: Any) -> str:
        return f"InBfloat16({self.data_})"

    def fsdp_pre_all_gather(
        self, mesh: Any, size: Any, stride: Any, module: Any, mixed: Any
    ) -> tuple[tuple[Tensor], None]:
        whole = self.data_
        per_rank = -(-size[0] // mesh.size())
        padded = whole.new_zeros(per_rank, *whole.shape[1:])
        padded[: len(whole)] = whole
        return (padded.to(torch.bfloat16),), None

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor], metadata: None, dtype: Any, *, out: Tensor | None = None
    ) -> Any:
        (whole,) = gathered
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(whole[: len(out)])
            return None
        found = whole.to(self.dtype)
        return found, (found,)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def bare(value: Any) -> Any:
            return value.data_ if isinstance(value, InBfloat16) else value

        out = func(*tree_map(bare, args), **tree_map(bare, kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            return args[0]
        if func not in _KEPT:
            return out
        return tree_map(lambda t: cls(t) if isinstance(t, Tensor) else t, out)


def gather_themselves(blocks: Any) -> None:
    """Make the matrices of these blocks such parameters."""
    for block in blocks:
        for layer in (block.up, block.down):
            layer.weight = nn.Parameter(InBfloat16(layer.weight.detach()))
