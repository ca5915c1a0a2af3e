"""Run a script with an Accelerate that also takes FSDP on CPUs.

    torchrun ... tests/support/accelerate_on_cpu.py script.py --arguments

Accelerate shards on accelerators only: on a CPU its state never switches to FSDP. Everything after
that decision (``prepare``, ``save_state``, ``load_state``, the Trainer of transformers) runs on a
CPU unchanged, so only the decision is replaced here.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

from accelerate import state  # pyright: ignore
from accelerate.utils import DistributedType  # pyright: ignore

_init = state.AcceleratorState.__init__


def _with_fsdp(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
    _init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU and fsdp_plugin is not None:
        self.distributed_type = DistributedType.FSDP
        self.fsdp_plugin = fsdp_plugin
        state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP


if __name__ == "__main__":
    os.environ["ACCELERATE_USE_CPU"] = "true"
    state.AcceleratorState.__init__ = _with_fsdp
    sys.argv = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")
