"""Checkpoints: saves the compressor's state, and loads it on the same or other ranks."""

from tagc.checkpoint.folders import open_folder, save_folder
from tagc.checkpoint.format import OneRank, Source, StateError, to_state_dict
from tagc.checkpoint.state import State
from tagc.checkpoint.unit_state import UnitState
