"""torchtitan: wraps the model of a trainer, and compresses the other dimensions of its meshes.

A ``ModelConverter`` would run before the model is sharded and has memory, and
``ModelSpec.post_optimizer_build_fn`` before there is a checkpointer to save residuals.

This module does not import torchtitan; it reads attributes of the ``trainer``.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch.distributed.fsdp import FSDPModule

from tagc.groups.mesh import compress_meshes
from tagc.handle.compressor import compressor
from tagc.handle.wrapper import wrap
from tagc.policy import Policy

Trainer = TypeVar("Trainer")
ParallelDims = TypeVar("ParallelDims")

# Where torchtitan keeps its meshes, those of several dimensions first.
_MESHES = ("_global_meshes", "_single_axis_meshes", "_multi_axis_meshes")


def compress(trainer: Trainer, policy: Any = None, *, key: str = "tagc", **options: Any) -> Trainer:
    """:func:`tagc.wrap` for the model of a torchtitan ``Trainer``; it also puts residuals into the
    trainer's checkpoints. Call it at the end of the trainer's ``__init__``, or before ``train()``.

    It supports torchtitan 0.3, which shards the model into ``trainer.model_parts``, divides the
    loss itself, and saves ``trainer.checkpointer.states`` with ``torch.distributed.checkpoint`` if
    ``checkpoint.enable`` is set. With pipeline stages, each part is wrapped separately. If the
    trainer captures its steps in a CUDA graph, which is its default, the first steps run without
    one: as many as :attr:`tagc.Compressor.steps_before_capture` says.

    Args:
        key: the residuals' key in a checkpoint; further parts have ``key_1`` and so on. To resume
            from a checkpoint of dense training, exclude the key with torchtitan's option
            ``checkpoint.exclude_from_loading``.
        policy, options: see :func:`tagc.wrap`.

    Returns:
        ``trainer``.

    Raises:
        ValueError: if the trainer lacks these attributes, or already has such a key; or as
            :func:`tagc.wrap` does.
        tagc.PolicyError, RuntimeError: see :func:`tagc.wrap`.
    """
    parts, states = _parts_and_states(trainer)
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
    _prepare_graphs(trainer, parts)
    return trainer


def compress_dimensions(parallel_dims: ParallelDims, policy: Any) -> ParallelDims:
    """Let torchtitan's meshes compress the dimensions that a policy names (``tp``, ``cp``, ``pp``,
    ``ep``). Call it at the end of the trainer's ``init_distributed``, before anything is split.

    Args:
        parallel_dims: torchtitan's ``ParallelDims``; its meshes are changed in place.
        policy: see :func:`tagc.wrap`; nothing is changed if it has no dimensions.

    Returns:
        ``parallel_dims``.

    Raises:
        ValueError: if torchtitan keeps its meshes elsewhere.
        tagc.PolicyError: if the policy is not valid.
    """
    loaded = Policy.load(policy)
    if not loaded.dimensions:
        return parallel_dims
    dims: Any = parallel_dims
    dims.build_mesh()
    tables: list[Any] = [getattr(dims, name, None) for name in _MESHES]
    if not all(isinstance(table, dict) for table in tables):
        raise ValueError(
            "tagc does not support this torchtitan: its ParallelDims lacks one of "
            f"{', '.join(_MESHES)}. Use a policy without dimensions"
        )
    found = [mesh for table in tables for mesh in table.values()]
    found += getattr(dims, "_spmd_meshes", [])
    compress_meshes({id(mesh): mesh for mesh in found}.values(), loaded)
    return parallel_dims


def _parts_and_states(trainer: Any) -> tuple[list[Any], dict[str, Any]]:
    """The model's parts, and the states that are saved with them."""
    parts = getattr(trainer, "model_parts", None)
    checkpointer = getattr(trainer, "checkpointer", None)
    states = getattr(checkpointer, "states", None)
    if states is None and getattr(checkpointer, "enable", None) is False:
        states = {}  # nothing is saved or loaded
    if not isinstance(parts, list) or not isinstance(states, dict):
        raise ValueError(
            "tagc does not support this torchtitan trainer: it needs model_parts, a list, and "
            "checkpointer.states, a dict. Call tagc.wrap on the sharded model instead, and add "
            "tagc.compressor(model) to the states that are saved"
        )
    return parts, states


def _prepare_graphs(trainer: Any, parts: list[Any]) -> None:
    """Let the trainer's CUDA graph, if there is one, be captured and replayed when tagc is ready.
    torchtitan runs its function once, captures and replays it in the second call, and only replays
    it from then on."""
    training = getattr(getattr(trainer, "config", None), "training", None)
    on_gpu = any(p.device.type == "cuda" for part in parts for p in part.parameters())
    if not on_gpu or getattr(training, "disable_cuda_graphs", True) is not False:
        return
    captured = getattr(trainer, "fwd_bwd_fn", None)
    run = getattr(trainer, "_forward_backward_body", None)
    if captured is None or run is None:
        raise ValueError(
            "tagc does not know how this torchtitan captures forward and backward in a CUDA graph: "
            "set training.disable_cuda_graphs (--training.disable-cuda-graphs)"
        )
    handles = [compressor(model) for model in parts]

    def forward_backward(*args: Any) -> Any:
        if any(handle.steps_before_capture for handle in handles):
            return run(*args)
        for handle in handles:
            if handle.is_captured:
                handle.before_replay()
            else:
                handle.before_capture()
        return captured(*args)

    trainer.fwd_bwd_fn = forward_backward
