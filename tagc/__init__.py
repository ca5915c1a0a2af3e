"""tagc: compressed gradient reduce-scatter for sharded PyTorch training."""

from tagc.explain import explain
from tagc.handle import Compressor, compressor
from tagc.policy import Policy, PolicyError, policies
from tagc.sketch import CountSketch, Decoded, Sketch
from tagc.state_format import StateError
from tagc.version import __version__
from tagc.wrapper import wrap

__all__ = [
    "Compressor",
    "CountSketch",
    "Decoded",
    "Policy",
    "PolicyError",
    "Sketch",
    "StateError",
    "__version__",
    "compressor",
    "explain",
    "policies",
    "wrap",
]
