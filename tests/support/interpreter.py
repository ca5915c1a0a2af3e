"""Triton's interpreter: what it needs to run the kernels, as GPUs round, and twice as quickly.

What is left out is what it does over and over to no effect, as Triton 3.4 to 3.9 do; another
version that has no such part stays as it is.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch


def prepare() -> None:
    """Call it before the first kernel."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    if importlib.import_module("triton").__version__.startswith("3.6."):
        accept_numpy(interpreter)
    patch_once(interpreter)
    skip_overflow(interpreter)
    round_to_nearest(interpreter)


def accept_numpy(interpreter: Any) -> None:
    """Let Triton 3.6 interpret loops under numpy 2.4, which calls no array of one an integer."""
    patch = interpreter._patch_lang_tensor

    def patch_index_too(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_index_too


def patch_once(interpreter: Any) -> None:
    """Every launch replaces the functions of `triton.language`, and puts them back; every call of
    a device function replaces them once more, for good those that it alone sees. Once will do."""
    call, patch = interpreter.InterpretedFunction.__call__, interpreter._patch_lang
    patched = set()

    def unless_patched(fn: Any) -> None:
        if fn not in patched:
            patched.add(fn)
            patch(fn)

    def inside_a_launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        interpreter._patch_lang = unless_patched
        try:
            return call(self, *args, **kwargs)
        finally:
            interpreter._patch_lang = patch

    interpreter.InterpretedFunction.__call__ = inside_a_launch


def skip_overflow(interpreter: Any) -> None:
    """Overflows of integers, which hashes are made of, are computed but asserted by no one unless
    one debugs."""
    options = interpreter.interpreter_builder.options
    if not options.debug:
        object.__setattr__(options, "sanitize_overflow", False)


def round_to_nearest(interpreter: Any) -> None:
    """Let it convert float32 to bfloat16 as GPUs do; by itself it drops the lower half."""
    builder, tl = interpreter.InterpreterBuilder, importlib.import_module("triton.language")
    convert = builder.cast_impl

    def rounded(self: Any, src: Any, dst_type: Any) -> Any:
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
            return convert(self, src, dst_type)
        half = torch.from_numpy(src.data.copy()).to(torch.bfloat16).view(torch.uint16)
        return interpreter.TensorHandle(half.numpy(), tl.bfloat16)

    builder.cast_impl = rounded
