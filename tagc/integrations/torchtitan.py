"""torchtitan: its trainer, once it is made.

Not a ``ModelConverter``: converters run before the model is sharded and has memory, and their other
hook, after an optimizer step, comes too late for a resumed run to load what it owes.

Nothing here imports torchtitan: a ``trainer`` is used by its attributes.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch.distributed.fsdp import FSDPModule

from tagc.handle import compressor
from tagc.wrapper import wrap

Trainer = TypeVar("Trainer")


def compress(trainer: Trainer, policy: Any = None, *, key: str = "tagc", **options: Any) -> Trainer:
    """:func:`tagc.wrap` for the model of a torchtitan ``Trainer``, and residuals in its
    checkpoints. Call it after the trainer is made, and before ``train()``.

    Written for torchtitan at commit ``003fe28``, which shards the model into
    ``trainer.model_parts``, divides the loss itself, and saves ``trainer.checkpointer.states`` with
    ``torch.distributed.checkpoint``. With pipeline stages each part is wrapped on its own.

    Args:
        key: of the residuals in a checkpoint; parts after the first are ``key_1`` and so on. To go
            on from a checkpoint of dense training, leave it out: torchtitan's option
            ``checkpoint.exclude_from_loading``.
        policy, options: see :func:`tagc.wrap`.

    Returns:
        ``trainer``.

    Raises:
        ValueError: if the trainer has other attributes than these, or has such a key already; or as
            :func:`tagc.wrap` does.
        tagc.PolicyError, RuntimeError: see :func:`tagc.wrap`.
    """
    parts = getattr(trainer, "model_parts", None)
    states = getattr(getattr(trainer, "checkpointer", None), "states", None)
    if not isinstance(parts, list) or not isinstance(states, dict):
        raise ValueError(
            "this is no torchtitan trainer as tagc knows it: it needs model_parts, a list, and "
            "checkpointer.states, a dict. Call tagc.wrap on the sharded model instead, and put "
            "tagc.compressor(model) among what is saved"
        )
    keys = [key if i == 0 else f"{key}_{i}" for i in range(len(parts))]
    taken = [name for name in keys if name in states]
    if taken:
        raise ValueError(f"the trainer's checkpoints already have {taken[0]!r}: pass another key")
    for name, model in zip(keys, parts, strict=True):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # torchtitan divides the loss and sets the divide factor to 1: a plain sum.
                module.set_force_sum_reduction_for_comms(True)
        wrap(model, policy, **options)
        states[name] = compressor(model)
    return trainer
