"""tagc: compressed gradient reduce-scatter for sharded PyTorch training."""

from tagc.checkpoint import StateError
from tagc.codecs.sketch.count_sketch import CountSketch, Decoded, Sketch
from tagc.costs import explain
from tagc.handle import Compressor, compressor
from tagc.policy import Policy, PolicyError, policies
from tagc.selfcheck import KernelError
from tagc.version import __version__
from tagc.wrapper import wrap

__all__ = [
    "Compressor",
    "CountSketch",
    "Decoded",
    "KernelError",
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
