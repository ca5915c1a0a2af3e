"""tagc: compresses the network traffic of PyTorch's FSDP, DDP, device meshes and sites.

Names are imported when they are first used, so that the command's help needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tagc.basics.version import __version__

if TYPE_CHECKING:
    from tagc.attach.torchft import SitesLostError
    from tagc.checkpoint import StateError
    from tagc.codecs.sketch.count_sketch import CountSketch, Decoded, Sketch
    from tagc.costs.explain import explain
    from tagc.groups.forward import activations, compress_activations
    from tagc.groups.mesh import dimension_options, init_device_mesh
    from tagc.handle.compressor import Compressor, compressor
    from tagc.handle.wrapper import wrap
    from tagc.policy import Policy, PolicyError, policies
    from tagc.selfcheck import KernelError
    from tagc.site.handle import Sites
    from tagc.site.setup import sites

__all__ = [
    "Compressor",
    "CountSketch",
    "Decoded",
    "KernelError",
    "Policy",
    "PolicyError",
    "Sites",
    "SitesLostError",
    "Sketch",
    "StateError",
    "__version__",
    "activations",
    "compress_activations",
    "compressor",
    "dimension_options",
    "explain",
    "init_device_mesh",
    "policies",
    "sites",
    "wrap",
]

_HOMES = {
    "Compressor": "tagc.handle.compressor",
    "CountSketch": "tagc.codecs.sketch.count_sketch",
    "Decoded": "tagc.codecs.sketch.count_sketch",
    "KernelError": "tagc.selfcheck",
    "Policy": "tagc.policy",
    "PolicyError": "tagc.policy",
    "Sites": "tagc.site.handle",
    "SitesLostError": "tagc.attach.torchft",
    "Sketch": "tagc.codecs.sketch.count_sketch",
    "StateError": "tagc.checkpoint",
    "activations": "tagc.groups.forward",
    "compress_activations": "tagc.groups.forward",
    "compressor": "tagc.handle.compressor",
    "dimension_options": "tagc.groups.mesh",
    "explain": "tagc.costs.explain",
    "init_device_mesh": "tagc.groups.mesh",
    "policies": "tagc.policy",
    "sites": "tagc.site.setup",
    "wrap": "tagc.handle.wrapper",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
