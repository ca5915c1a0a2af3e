"""Integrations: the only files that know the internals of FSDP, DDP and torchft."""

from tagc.attach.changes import OptimizerSteps
from tagc.attach.frozen import ShardValues, look_at_frozen, with_specials
from tagc.attach.integrations import INTEGRATIONS, distinct, integration_of, sharding_groups
from tagc.attach.levels import Levels
from tagc.attach.unit import Integration, Unit
