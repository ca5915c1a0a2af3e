"""Torch's own kernels beside ours: noted, and those that write to what is there are not run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_NO_KERNELS = ("aten::detach", "aten::alias")


class TorchKernels(TorchDispatchMode):
    """Inside, calls that neither make a view nor allocate are noted.

    Args:
        note: is given the bytes of the tensors that the kernel reads and writes.
    """

    def __init__(self, note: Callable[[int], object]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, schema = kwargs or {}, func._schema
        view = any(r.alias_info and not r.alias_info.is_write for r in schema.returns)
        if view or "empty" in schema.name or schema.name in _NO_KERNELS:
            return func(*args, **kwargs)
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        self._note(sum(x.numel() * x.element_size() for x in tensors))
        written = [
            i for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write
        ]
        if not written:
            return func(*args, **kwargs)
        at = written[0]
        return args[at] if at < len(args) else kwargs[schema.arguments[at].name]
