"""float16 with a loss scale: keep residuals right when the scaler skips a step.

    torchrun --standalone --nproc-per-node 2 examples/loss_scaling.py

Residuals are in the units of scaled gradients, so they must follow the scale. Gradients sent in a
skipped step never reach the weights, so the residuals from before that step are restored.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import tagc


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    losses: Iterable[Callable[[], Tensor]],
) -> None:
    """Train a wrapped model with a loss scaler, one step per loss."""
    compressor = tagc.compressor(model)
    one = torch.ones((), device=next(model.parameters()).device)
    for loss in losses:
        owed = compressor.copy_residuals()
        # The scale as a tensor: get_scale() would wait for the device.
        before = scaler.scale(one)
        scaler.scale(loss()).backward()
        scaler.step(optimizer)  # skips if a gradient is not finite, on all ranks alike
        scaler.update()
        optimizer.zero_grad()
        factor = scaler.scale(one) / before
        compressor.restore_residuals(owed, where=factor < 1)  # the step was skipped
        compressor.scale_residuals(factor)


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).to(device)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.float16, torch.float16))
    tagc.wrap(model, "loco-4bit")

    def loss() -> Tensor:
        x = torch.randn(64, 256, device=device)
        return (model(x).float() - x).square().mean()

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    # High enough that the first steps overflow.
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**24)
    for _ in range(4):
        train(model, optimizer, scaler, [loss] * 25)
        if dist.get_rank() == 0:
            print(f"loss {loss().item():.4f}, scale {scaler.get_scale():.0f}")
        else:
            loss()
    dist.destroy_process_group()


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="tagc runs its eager reference")
        main()
