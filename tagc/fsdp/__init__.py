"""Integrations: the only files that know the internals of what shards a model."""

from tagc.fsdp.frozen import FrozenValues, ShardValues, look_at_frozen, with_specials
from tagc.fsdp.integrations import INTEGRATIONS, integration_of, sharding_groups
from tagc.fsdp.left import check_left, notes_on_left
from tagc.fsdp.levels import Levels
from tagc.fsdp.optimizer_steps import OptimizerSteps
from tagc.fsdp.unit import Integration, Unit

__all__ = [
    "INTEGRATIONS",
    "FrozenValues",
    "Integration",
    "Levels",
    "OptimizerSteps",
    "ShardValues",
    "Unit",
    "check_left",
    "integration_of",
    "look_at_frozen",
    "notes_on_left",
    "sharding_groups",
    "with_specials",
]
