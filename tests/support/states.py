"""Training, saving and resuming a small model, for the tests of state."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import yaml
from torch import Tensor, nn

import tagc
from support.paths import ROOT
from support.small_net import local, local_weights, loss_of, sharded
from tagc.checkpoint.by_parameter import split_part
from tagc.checkpoint.format import RankState, Source, StateHeader, with_digest
from tagc.plan import Box


def rules(codec: dict[str, Any], feedback: dict[str, Any] | None = None, **more: Any) -> dict:
    """A policy with one codec for all weights; `matrix` for those that are matrices."""
    names = ["first.*.weight", "second.*.weight", "head.weight"]
    names = names if codec["kind"] == "matrix" else ["*.weight"]
    rule: dict[str, Any] = {"when": {"name": names}, "codec": codec}
    if feedback is not None:
        rule["feedback"] = feedback
    return {"schema": 1, "gradients": [rule], **more}


def with_changes(bits: int, **more: Any) -> dict:
    """Parameters as changes against a copy."""
    when = {"name": ["first.*.weight", "second.*.weight", "head.weight"]}
    codec = {"kind": "delta", "bits": bits, **more}
    return rules(QUANTIZED, parameters=[{"when": when, "codec": codec}])


SKETCH = {"kind": "sketch", "density": 0.3}
QUANTIZED = {"kind": "quantized", "bits": 4, "block": 32}
MATRIX = {"kind": "matrix", "bits": 2}
BFLOAT16 = {"kind": "residual", "dtype": "bfloat16"}
LEAD = {"kind": "residual", "lead": 0.4}
# Every codec with every kind of feedback that it can have, and every switch that adds state.
POLICIES: dict[str, dict[str, Any]] = {
    "quantized average": rules(QUANTIZED, {"kind": "average", "beta": 0.5, "reset_steps": 3}),
    "quantized residual": rules(QUANTIZED, {"kind": "residual"}),
    "quantized none": rules(QUANTIZED, {"kind": "none"}),
    "quantized dithered": rules(QUANTIZED | {"rounding": "stochastic"}),
    "inside": rules(QUANTIZED, {"kind": "residual"}, inside="int8"),
    "inside and changes": with_changes(4) | {"inside": "int8"},
    "inside warming up": rules(SKETCH | {"warmup_steps": 2}, inside="bfloat16"),
    "matrix lead": rules(MATRIX | {"level": 1.3}, LEAD),
    "matrix average": rules(
        {"kind": "matrix", "warmup_steps": 1}, {"kind": "average", "beta": 0.5, "reset_steps": 3}
    ),
    # A segment of everything, which is FSDP1's own buffer.
    "whole lead": {
        "schema": 1,
        "gradients": [{"when": {"min_numel": 1}, "codec": QUANTIZED, "feedback": LEAD}],
    },
    "sketch": rules(SKETCH),
    "sketch lead": rules(SKETCH | {"warmup_steps": 1}, LEAD),
    "sketch bfloat16": rules(SKETCH | {"symbol": "int16x2"}, BFLOAT16),
    "sketch shared": rules(SKETCH | {"symbol": "int32x1", "support": "shared"}),
    "warming up": rules(SKETCH | {"warmup_steps": 6}),
    "parameters": rules(
        QUANTIZED,
        parameters=[
            {
                "when": {"name": "*.weight"},
                "codec": {"kind": "quantized", "bits": 8, "keep_for_backward": True},
            }
        ],
    ),
    "changes": with_changes(4, rounding="stochastic"),
    "changes in 2 bits": with_changes(2),
}


def shipped(name: str) -> dict[str, Any]:
    """A policy that comes with the library, for weights of any size and role, with a short
    warm-up."""
    policy = yaml.safe_load((ROOT / "policies" / f"{name}.yaml").read_text())
    for rule in (*policy["gradients"], *policy.get("parameters", [])):
        if rule["when"]:
            # Roles are not those of the small model.
            rule["when"] = {"min_numel": 1} | {
                k: v for k, v in rule["when"].items() if k == "dtype"
            }
        if "warmup_steps" in rule["codec"]:
            rule["codec"]["warmup_steps"] = 1
    return policy


def wrapped(policy: dict[str, Any], model: Any = None, **options: Any) -> Any:
    """A model, the small one of the tests of FSDP2 by default."""
    model = sharded() if model is None else model
    with warnings.catch_warnings():
        # Units as small as these may send more when compressed.
        warnings.filterwarnings("ignore", message=".*sends .* per step at this number of ranks")
        return tagc.wrap(model, policy, **options)


def run(model: nn.Module, rank: int, steps: range) -> None:
    """Train, with an optimizer that has no state of its own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in steps:
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def set_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Give every parameter this rank's shard."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            local(parameters[name]).copy_(weight)


def save(model: nn.Module, folder: Path, saver: str) -> None:
    """Save with torch's distributed checkpoints, or to safetensors files."""
    compressor = tagc.compressor(model)
    if saver == "dcp":
        dcp.save({"tagc": compressor}, checkpoint_id=folder)
    else:
        compressor.save(folder)


def load(model: nn.Module, folder: Path, saver: str) -> None:
    """Load a save of the same number of ranks."""
    compressor = tagc.compressor(model)
    if saver == "dcp":
        dcp.load({"tagc": compressor}, checkpoint_id=folder)
    else:
        compressor.load(folder)


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything that training continues from, and the counters."""
    compressor = tagc.compressor(model)
    return {
        "weights": local_weights(model),
        "state": compressor.state_dict(),
        "metrics": vars(compressor.metrics()),
    }


def residual_sums(model: nn.Module) -> dict[str, Tensor]:
    """This rank's residuals in float64, by parameter, and with a lead its owner state, in the
    parameter's shape."""
    sums = {}
    shapes = {row.param: row.shape for row in tagc.compressor(model).plan().rows}
    for name, tensor in tagc.compressor(model).state_dict().items():
        _, found, parameter = name.partition(".residual.gradients.")
        if found:
            parameter, whole = in_whole(parameter, tensor, shapes)
            sums[parameter] = sums.get(parameter, 0) + whole
        _, found, shard = name.partition(".sent.gradients.")
        if found:
            parameter, whole = in_whole(shard, tensor, shapes)
            sums[f"sent of {parameter}"] = whole
    return sums


def in_whole(
    name: str, tensor: Tensor, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[str, Tensor]:
    """A parameter's name, and its saved values, or those of a shard, with zeros elsewhere."""
    parameter, part = split_part(name)
    whole = torch.zeros(shapes[parameter], dtype=torch.float64)
    boxes = part.boxes(shapes[parameter], dim=0)
    pieces = tensor.flatten().double().split([box.numel for box in boxes])
    for box, piece in zip(boxes, pieces, strict=True):
        whole[Box.whole(shapes[parameter]).index(box)] = piece.view(box.shape)
    return parameter, whole


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A temporary folder that all ranks see."""
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names, src=0)
    folder = Path(str(names[0]))
    yield folder
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


SAVERS = ("dcp", "safetensors")


def train_and_save(rank: int, saver: str, policy: dict, folder: Path) -> dict[str, Tensor]:
    model = wrapped(policy)
    run(model, rank, range(3))
    save(model, folder, saver)
    return residual_sums(model)


def stored(ranks: Mapping[int, Mapping[str, Tensor]]) -> Source:
    """A source of ranks' saved states, in memory."""

    def state(rank: int) -> RankState:
        header = StateHeader(
            policy="", policy_hash="0" * 64, layout="0" * 64, world_size=99, rank=rank, step=0
        )
        tensors = dict(ranks[rank])
        shapes = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}
        metadata = with_digest(header.to_strings(), tensors)
        return RankState("here", metadata, shapes, lambda: tensors)

    return Source("here", {rank: state(rank) for rank in ranks})
