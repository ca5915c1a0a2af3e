"""``torchtitan.train`` on a CPU: ``python torchtitan_on_cpu.py FOLDER ...`` runs it in FOLDER with
the other arguments, after making a byte tokenizer and a small data set there.

torchtitan 0.3 treats a machine without a GPU as one with CUDA. Its attention has no backward on a
CPU. After the first step it sets timeouts with a function that torch 2.13 does not have. This
script replaces these three, and nothing else.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # pyright: ignore
from torchtitan.tools import utils  # pyright: ignore

WORDS = ["the", "of", "to", "and", "in", "is", "it", "for", "on", "that", "with", "as", "was"]


class Cpu:
    """The parts of ``torch.cuda`` that torchtitan uses."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: torch.device) -> str:
        return "CPU"

    def get_device_properties(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(total_memory=1 << 30)

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        return {}


def causal(q: Any, k: Any, v: Any, *, scale: Any, enable_gqa: bool, **_: Any) -> tuple[Any, None]:
    """Flex attention with one document per sequence."""
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa), None


def make_assets(folder: Path) -> None:
    """Make a tokenizer and data where the debug models' configs look for them."""
    tokenizer, data = (folder / "tests" / "assets" / name for name in ("tokenizer", "c4_test"))
    for made in (tokenizer, data):
        made.mkdir(parents=True, exist_ok=True)
    letters = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=letters, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<bos>", "<eos>"])
    made.save(str(tokenizer / "tokenizer.json"))
    special = {"bos_token": "<bos>", "eos_token": "<eos>"}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(special))
    chance = random.Random(0)
    texts = [" ".join(chance.choices(WORDS, k=300)) for _ in range(200)]
    (data / "data.json").write_text("\n".join(json.dumps({"text": text}) for text in texts))


if __name__ == "__main__":
    folder = Path(sys.argv.pop(1))
    if os.environ["RANK"] == "0":
        make_assets(folder)
        (folder / "made").touch()
    while not (folder / "made").exists():
        pass
    os.chdir(folder)
    utils.device_type, utils.device_module = "cpu", Cpu()
    from torchtitan.distributed import utils as distributed  # pyright: ignore
    from torchtitan.models.common.attention import FlexAttention  # pyright: ignore
    from torchtitan.train import main  # pyright: ignore

    FlexAttention._compiled_flex_attn = causal
    if not hasattr(torch.distributed, "set_timeout"):
        distributed.set_pg_timeouts = lambda *_, **__: None
    main()
