"""A model of Hugging Face transformers, made from a config: nothing is downloaded.

torchrun --standalone --nproc-per-node 2 examples/recipes/transformers_model.py
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from task import LENGTH, VOCABULARY, WIDTH, batch
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM  # pyright: ignore

import tagc


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank = dist.get_rank()
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
        )
    ).to(device)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    tagc.wrap(model, policy="hybrid")
    if rank == 0:
        print(tagc.compressor(model).plan())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(args.steps):
        first = batch(step, rank, device)[:, :1]
        tokens = (first + torch.arange(LENGTH, device=device)) % VOCABULARY  # it learns to count
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    metrics = tagc.compressor(model).metrics()
    if rank == 0:
        ratio = metrics.dense_bytes / metrics.wire_bytes
        print(f"loss {loss.item():.6f}, {ratio:.1f} times fewer gradient bytes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
