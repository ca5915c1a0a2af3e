"""Patches for Triton's interpreter: it runs the kernels, rounds like GPUs, and is twice as fast.

They remove work that Triton 3.4 to 3.9 repeat to no effect. Versions without such a part stay
unchanged.
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
    """Let Triton 3.6 interpret loops under numpy 2.4, which takes no array of one element as an
    integer."""
    patch = interpreter._patch_lang_tensor

    def patch_index_too(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_index_too


def patch_once(interpreter: Any) -> None:
    """Replace the functions of `triton.language` only once. Triton replaces and restores them in
    every launch, and again in every call of a device function."""
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
    """Skip the checks for integer overflow, which only debugging asserts; hashes overflow on
    purpose."""
    options = interpreter.interpreter_builder.options
    if not options.debug:
        object.__setattr__(options, "sanitize_overflow", False)


def round_to_nearest(interpreter: Any) -> None:
    """Convert float32 to bfloat16 as GPUs do; the interpreter itself drops the lower half."""
    builder, tl = interpreter.InterpreterBuilder, importlib.import_module("triton.language")
    convert = builder.cast_impl

    def rounded(self: Any, src: Any, dst_type: Any) -> Any:
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
            return convert(self, src, dst_type)
        half = torch.from_numpy(src.data.copy()).to(torch.bfloat16).view(torch.uint16)
        return interpreter.TensorHandle(half.numpy(), tl.bfloat16)

    builder.cast_impl = rounded
