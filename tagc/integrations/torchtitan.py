"""torchtitan: its trainer, once it is made.

Not a ``ModelConverter``: converters run before the model is sharded and has memory. Nor
``ModelSpec.post_optimizer_build_fn``, which runs before there is a checkpointer to save residuals.

Nothing here imports torchtitan: a ``trainer`` is used by its attributes.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch.distributed.fsdp import FSDPModule

from tagc.handle.compressor import compressor
from tagc.handle.wrapper import wrap

Trainer = TypeVar("Trainer")


def compress(trainer: Trainer, policy: Any = None, *, key: str = "tagc", **options: Any) -> Trainer:
    """:func:`tagc.wrap` for the model of a torchtitan ``Trainer``, and residuals in its
    checkpoints. Call it at the end of the trainer's ``__init__``, or before ``train()``.

    For torchtitan 0.3, which shards the model into ``trainer.model_parts``, divides the loss
    itself, and saves ``trainer.checkpointer.states`` with ``torch.distributed.checkpoint``, if
    ``checkpoint.enable`` is set. With pipeline stages each part is wrapped on its own.

    Args:
        key: of the residuals in a checkpoint; parts after the first are ``key_1`` and so on. To go
            on from a checkpoint of dense training, leave it out: torchtitan's option
            ``checkpoint.exclude_from_loading``.
        policy, options: see :func:`tagc.wrap`.

    Returns:
        ``trainer``.

    Raises:
        ValueError: if the trainer has other attributes than these, or has such a key already; if it
            would capture its steps in a CUDA graph; or as :func:`tagc.wrap` does.
        tagc.PolicyError, RuntimeError: see :func:`tagc.wrap`.
    """
    parts, states = _parts_and_states(trainer)
    keys = [key if i == 0 else f"{key}_{i}" for i in range(len(parts))]
    taken = [name for name in keys if name in states]
    if taken:
        raise ValueError(f"the trainer's checkpoints already have {taken[0]!r}: pass another key")
    _check_graphs(trainer, parts)
    for name, model in zip(keys, parts, strict=True):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # torchtitan divides the loss and sets the divide factor to 1: a plain sum.
                module.set_force_sum_reduction_for_comms(True)
        wrap(model, policy, **options)
        states[name] = compressor(model)
    return trainer


def _parts_and_states(trainer: Any) -> tuple[list[Any], dict[str, Any]]:
    """The model's parts, and what is saved beside them."""
    parts = getattr(trainer, "model_parts", None)
    checkpointer = getattr(trainer, "checkpointer", None)
    states = getattr(checkpointer, "states", None)
    if states is None and getattr(checkpointer, "enable", None) is False:
        states = {}  # nothing is saved, nor loaded
    if not isinstance(parts, list) or not isinstance(states, dict):
        raise ValueError(
            "this is no torchtitan trainer as tagc knows it: it needs model_parts, a list, and "
            "checkpointer.states, a dict. Call tagc.wrap on the sharded model instead, and put "
            "tagc.compressor(model) among what is saved"
        )
    return parts, states


def _check_graphs(trainer: Any, parts: list[Any]) -> None:
    """Refuse to be captured: a graph would repeat the seeds, the warm-up and the decisions of the
    step in which it was, and no counter would advance.

    Raises:
        ValueError: if torchtitan captures forward and backward.
    """
    training = getattr(getattr(trainer, "config", None), "training", None)
    on_gpu = any(p.device.type == "cuda" for part in parts for p in part.parameters())
    if on_gpu and getattr(training, "disable_cuda_graphs", True) is False:
        raise ValueError(
            "torchtitan would capture forward and backward in a CUDA graph, which repeats one step "
            "of tagc for ever: set training.disable_cuda_graphs (--training.disable-cuda-graphs)"
        )
