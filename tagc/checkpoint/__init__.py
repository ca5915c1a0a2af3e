"""Checkpoints: saves the compressor's state, and loads it on the same or other ranks."""

from tagc.checkpoint.by_parameter import UnitState
from tagc.checkpoint.files import open_folder, save_folder
from tagc.checkpoint.format import Source, StateError, from_state_dict, to_state_dict
from tagc.checkpoint.state import State
