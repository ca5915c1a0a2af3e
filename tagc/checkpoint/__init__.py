"""Checkpoints: what the compressor saves, and how it is found again, by as many ranks or others."""

from tagc.checkpoint.folders import open_folder, save_folder
from tagc.checkpoint.format import OneRank, Source, StateError, to_state_dict
from tagc.checkpoint.state import State
from tagc.checkpoint.unit_state import UnitState

__all__ = [
    "OneRank",
    "Source",
    "State",
    "StateError",
    "UnitState",
    "open_folder",
    "save_folder",
    "to_state_dict",
]
