"""torchtitan's own models, trained with compressed collectives.

Nothing of torchtitan is changed: `--module` names this file, `--config` one of its functions.

torchrun --standalone --nproc-per-node 2 -m torchtitan.train --module torchtitan_trainer \
    --config llama3 --tagc-policy hybrid
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from torchtitan.distributed import ParallelDims  # pyright: ignore
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel  # pyright: ignore
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # pyright: ignore
from torchtitan.trainer import Trainer  # pyright: ignore

from tagc.integrations.torchtitan import compress, compress_dimensions


class CompressedTrainer(Trainer):
    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        tagc_policy: str = "hybrid"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        compress(self, config.tagc_policy)

    def init_distributed(self) -> ParallelDims:
        return compress_dimensions(super().init_distributed(), self.config.tagc_policy)


def compressed(config: Trainer.Config) -> CompressedTrainer.Config:
    """The same training, by the trainer above."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return CompressedTrainer.Config(**values)


def llama3() -> CompressedTrainer.Config:
    return compressed(llama3_debugmodel())


def deepseek_v3() -> CompressedTrainer.Config:
    return compressed(deepseek_v3_debugmodel())
