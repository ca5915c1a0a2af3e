"""Parameters that a plan does not know, because they were added or unfrozen after ``tagc.wrap``.

Their gradients would be reduced uncompressed, or not at all, and nobody would say so.
"""

from __future__ import annotations

from itertools import chain
from weakref import ref

from torch import nn

from tagc.plan import as_list
from tagc.policy.roles import clean_name


class KnownParameters:
    """The parameters of a model as they are now. Once in every step, compares them with then."""

    def __init__(self, model: nn.Module) -> None:
        self._model = ref(model)
        self._known = dict(model.named_parameters(remove_duplicate=False))
        self._frozen = {n: p for n, p in self._known.items() if not p.requires_grad}
        self._steps = -1
        self._look(model)

    def check(self, steps: int) -> None:
        """Refuse new parameters that require a gradient, before a unit is reduced.

        Args:
            steps: reductions of the unit so far; later units of a step check nothing again.

        Raises:
            RuntimeError: naming the parameters, and the remedy.
        """
        if steps <= self._steps:
            return
        self._steps = steps
        new = [name for name, param in self._frozen.items() if param.requires_grad]
        model = self._model()
        if model is not None and not new and self._has_changed():
            known = {id(param) for param in self._known.values()}
            new = [
                name
                for name, param in model.named_parameters()
                # FSDP may have put others in their places for the time of a backward.
                if param.requires_grad and name not in self._known and id(param) not in known
            ]
            if not new:
                self._look(model)
        if new:
            self._steps = -1  # a reduction that is tried again raises, too
            names = as_list([clean_name(name) for name in new])
            raise RuntimeError(
                f"tagc: {names} got requires_grad, or joined the model, after tagc.wrap, so the "
                "plan does not know them: make such changes before the model is sharded (or put "
                "into DistributedDataParallel) and wrapped, or call "
                "tagc.compressor(model).remove() and tagc.wrap again"
            )

    def _look(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._children = [module._modules for module in modules]
        self._parameters = [module._parameters for module in modules]
        self._seen = self._structure()

    def _has_changed(self) -> bool:
        return self._seen != self._structure()

    def _structure(self) -> tuple[list[int], list[int]]:
        """Cheap enough for every step: which modules, and how many parameters each has. (FSDP
        exchanges the parameters themselves.)"""
        children = chain.from_iterable(children.values() for children in self._children)
        return [*map(id, children)], [*map(len, self._parameters)]
