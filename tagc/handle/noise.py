"""Measures the codecs' noise as a factor per parameter; corrects learning rates and clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import wraps
from types import MethodType
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from tagc.attach import Unit
from tagc.attach.changes import with_closure
from tagc.basics.tracing import untraced
from tagc.basics.warn import warn
from tagc.collect import Transport, UnitReducer, noise_factor

_EVERY = 16
"""Ranks agree on factors at every power of two up to this many reductions, then at every multiple
of it."""

_DIVIDE = {"Adadelta", "Adafactor", "Adagrad", "Adamax", "RMSprop"}
_DO_NOT = {"ASGD", "LBFGS", "Lion", "Muon", "Rprop", "SGD"}

_KEPT: WeakSet[Optimizer] = WeakSet()
"""Optimizers whose rates are kept."""


class Noise(NamedTuple):
    """The noise of one parameter's gradients.

    Attributes:
        factor: their RMS relative to dense.
        numel: elements of the whole parameter. (With FSDP1's ``use_orig_params`` optimizers hold
            shards, whose sizes differ from rank to rank.)
        duplicated: whether tensor-parallel ranks have the same elements.
        in_a_bit: whether codes of 1 bit carry them. (Those refuse flat parameters.)
    """

    factor: float
    numel: int
    duplicated: bool = False
    in_a_bit: bool = False


Pair = tuple[nn.Parameter, Noise]


class NoiseFactors:
    """RMS of gradients relative to dense, per parameter, as reducers measure them; the same on all
    ranks, which exchange a few numbers for each unit after 1, 2, 4, 8 and 16 reductions, and then
    after every 16."""

    def __init__(
        self,
        units: Sequence[tuple[Unit, Sequence[UnitReducer]]],
        replicas: dist.ProcessGroup | None,
    ) -> None:
        """``units`` have the reducers that their gradients go through: over the ranks that share
        the parameters, then over replicas if there are any."""
        self._units, self._replicas = units, replicas
        for _, reducers in units:
            for reducer in reducers:
                if reducer.gauge is None:  # a loaded state may have measured already
                    reducer.measure_noise()

    def agree(self) -> None:
        """Exchange the measurements if an exchange is due. Call it on all ranks."""
        due = [(unit, made) for unit, made in self._units if any(map(_is_due, made))]
        for group in dict.fromkeys(unit.group for unit, _ in due):
            together = [r for unit, made in due if unit.group is group for r in made]
            measured = [(r, r.gauge) for r in together if r.gauge is not None]
            sums = torch.cat([gauge.sums for _, gauge in measured])
            for ranks in (group, self._replicas):
                if ranks is not None:
                    # Summed in the order of ranks, so the backend's algorithm does not matter.
                    sums = Transport(ranks).gather_values(sums)[0].sum(0)
            rows = sums.cpu().split([len(gauge.sums) for _, gauge in measured])
            for (reducer, gauge), row in zip(measured, rows, strict=True):
                gauge.agreed.copy_(row)
                gauge.agreed_at.fill_(reducer.counters.compressed_steps)

    def by_parameter(self) -> dict[int, Noise]:
        """The noise of the parameters that an optimizer may hold, by ``id(parameter)``."""
        found: dict[int, Noise] = {}
        for unit, reducers in self._units:
            noises, params = _noises(unit, reducers), unit.trainable()
            if len(params) != len(noises):  # one flat parameter
                noises = [Noise(_mean(noises), params[0].numel())]
            found |= {id(p): noise for p, noise in zip(params, noises, strict=True)}
        return found

    def over_parallel(self, mean: float) -> float | Tensor:
        """A mean factor, over tensor-parallel ranks too; they measure different parts of what they
        divide. Call it on all ranks."""
        groups = {group: unit for unit, _ in self._units for group in unit.parallel}
        found: float | Tensor = mean
        for group, unit in groups.items():
            mine = torch.as_tensor(found, dtype=torch.float32, device=unit.device)
            found = Transport(group).gather_values(mine)[0].log().mean().exp()
        return found

    def mean(self) -> float:
        """Geometric mean over all elements with a factor other than 1; NaN without any."""
        noises = [n for pair in self._units for n in _noises(*pair) if n.factor != 1]
        return _mean(noises) if noises else math.nan


def _noises(unit: Unit, reducers: Sequence[UnitReducer]) -> list[Noise]:
    """The noise of each parameter of the unit."""
    factors = {info.name: 1.0 for info in unit.info.params}
    in_a_bit: set[str] = set()
    for reducer in reducers:
        if reducer.gauge is not None:
            for segment, squares in zip(reducer.plan.compressed, reducer.gauge.agreed, strict=True):
                factor, names = noise_factor(squares), [param.name for param in segment.params]
                factors |= {name: factors[name] * factor for name in names}
                in_a_bit.update(names if segment.codec.nominal_bits == 1 else ())
    return [
        Noise(factors[i.name], math.prod(i.shape), i.duplicate is not None, i.name in in_a_bit)
        for i in unit.info.params
    ]


def _is_due(reducer: UnitReducer) -> bool:
    """Whether ranks exchange the reducer's measurements."""
    if reducer.gauge is None:
        return False
    now, agreed = (
        steps.bit_length() if steps < _EVERY else _EVERY.bit_length() + steps // _EVERY
        for steps in (reducer.counters.compressed_steps, int(reducer.gauge.agreed_at))
    )
    return now != agreed


def _mean(noises: Collection[Noise]) -> float:
    """Geometric mean of the factors over elements, because factors multiply rates."""
    total = sum(noise.numel for noise in noises)
    logs = sum(noise.numel * math.log(noise.factor) for noise in noises)
    return math.exp(logs / total) if total else 1.0


class LearningRateScaling:
    """The changes of :meth:`tagc.Compressor.keep_rates` to an optimizer, until they are removed.

    In a step, the optimizer has other parameter groups than outside: each is cut into parts whose
    parameters have about the same factor. Hooks and the step's closure see the user's groups.

    Attributes:
        factors: the mean factor of each parameter group in the last step.
    """

    def __init__(
        self, optimizer: Optimizer, noise: NoiseFactors, *, second_moment: bool | None
    ) -> None:
        if optimizer in _KEPT:
            raise ValueError(
                "this optimizer's rates are already kept; call remove() first. If it has "
                "parameters of several wrapped models, give each model its own optimizer"
            )
        _check_holds_none(optimizer)
        self._optimizer, self._noise = optimizer, noise
        self._divides = divides_by_second_moment(optimizer, second_moment)
        # Refuse optimizers that choose their rates themselves (transformers' Adafactor).
        for i, group in enumerate(optimizer.param_groups if self._divides else ()):
            if group.get("lr") is None or group.get("relative_step"):
                raise ValueError(
                    f"parameter group {i} of {type(optimizer).__name__} has no learning rate to "
                    "keep: the optimizer chooses it itself; give it one (lr=..., "
                    "relative_step=False)"
                )
        _warn_of_few_bits(optimizer, noise)
        # During a step: the user's group of each part, the part, and its values before the step.
        self._parts: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        self._removed = False
        self.factors = [1.0] * len(optimizer.param_groups)
        self._hooks = (
            optimizer.register_step_pre_hook(untraced(self._before)),
            optimizer.register_step_post_hook(untraced(lambda *_: self._restore())),
            optimizer.register_state_dict_pre_hook(lambda _: self._restore()),
        )
        self._step = self._restoring(optimizer.step)
        self._step_before = vars(optimizer).get("step")
        optimizer.step = self._step
        _KEPT.add(optimizer)

    def remove(self) -> None:
        if self._removed:
            return
        self._restore()
        self._removed = True
        _KEPT.discard(self._optimizer)
        for hook in self._hooks:
            hook.remove()
        if vars(self._optimizer).get("step") is not self._step:
            return  # someone wrapped it and still calls it
        if self._step_before is None:
            del self._optimizer.step
        else:
            self._optimizer.step = self._step_before

    def _go_inside(self) -> None:
        """Let others' hooks, also later ones, run before the groups are cut or after they are
        restored."""
        if self._removed:
            return
        before: Any = self._optimizer._optimizer_step_pre_hooks
        after: Any = self._optimizer._optimizer_step_post_hooks
        before.move_to_end(self._hooks[0].id)
        after.move_to_end(self._hooks[1].id, last=False)

    def _restoring(self, step: Callable[..., Any]) -> Any:
        """``step``, but the user's rates are restored afterwards, even if it raises; torch then
        calls no hook. It is a method because torch's schedulers need one."""
        go_inside, restore = untraced(self._go_inside), untraced(self._restore)

        @wraps(getattr(step, "__func__", step))  # torch's GradScaler reads its signature
        def restoring(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            go_inside()
            try:
                return step(*args, **kwargs)
            finally:
                restore()

        return MethodType(restoring, self._optimizer)

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._cut()
        return with_closure(self._outside, args, kwargs)

    def _outside(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """``closure``, which sees the user's groups; the rest of the step has its noise."""

        def outside(*args: Any, **kwargs: Any) -> Any:
            self._restore()
            result = closure(*args, **kwargs)
            self._cut()
            return result

        return outside

    def _cut(self) -> None:
        # In case the last step raised and was not called through `restoring`.
        self._restore()
        # Even if nothing is divided: other ranks may step another optimizer first.
        self._noise.agree()
        if self._removed or not self._divides:
            return
        optimizer = self._optimizer
        known = self._noise.by_parameter()
        self.factors, parts = [], []
        for group in optimizer.param_groups:
            # What is not known is not compressed.
            noises = [known.get(id(p)) or Noise(1.0, p.numel()) for p in group["params"]]
            self.factors.append(_mean(noises))
            pairs, whole = list(zip(group["params"], noises, strict=True)), _is_whole(group)
            for alike in [pairs] if whole else _alike(pairs):
                factor = _mean([noise for _, noise in alike])
                params = [param for param, _ in alike]
                if whole:  # also what all tensor-parallel ranks have, which must stay the same
                    factor = float(self._noise.over_parallel(factor))
                part = {**group, "params": params, "lr": group["lr"] * factor}
                if _decays_apart(optimizer, group):
                    # Weights decay by rate times weight_decay, and this product must not change.
                    part["weight_decay"] = group["weight_decay"] / factor
                parts.append((group, part, dict(part)))
        self._parts = parts
        # In place: others may hold the list.
        optimizer.param_groups[:] = [part for _, part, _ in parts]

    def _restore(self) -> None:
        """Restore the user's groups, with what the step wrote to their parts.

        Raises:
            ValueError: if it wrote a rate or a decay.
        """
        if not self._parts:
            return
        changed: set[str] = set()
        for group, part, before in self._parts:
            written = {k: v for k, v in part.items() if k not in before or v is not before[k]}
            for key in ("lr", "weight_decay"):
                if key in written and written.pop(key) != before.get(key):
                    changed.add(key)
            group.update(written)
        groups = self._optimizer.param_groups
        users = {id(group): group for group, _, _ in self._parts}
        groups[:] = [*users.values(), *groups[len(self._parts) :]]
        self._parts = []
        if changed:
            raise ValueError(
                f"{type(self._optimizer).__name__} changes {' and '.join(sorted(changed))} of its "
                "groups in its own step, where keep_rates has multiplied them: change them in a "
                "scheduler, a hook or the closure"
            )


def _is_whole(group: dict[str, Any]) -> bool:
    """Whether a group stays whole, with one factor: its parts would add to the same number.
    Schedule-free optimizers add up rates, and some (apex) count steps in a tensor."""
    tensors = [k for k, v in group.items() if isinstance(v, Tensor) and not k.endswith("lr")]
    return bool(tensors) or "weight_sum" in group or not group["params"]


def _alike(pairs: Sequence[Pair]) -> Iterable[list[Pair]]:
    """Parameters whose factors differ by less than a quarter of an octave, or are 1. What all
    tensor-parallel ranks have whole is apart from what they divide: only its factors are the same
    on all of them."""
    found: dict[tuple[int, bool] | None, list[Pair]] = {}
    for param, noise in pairs:
        octave = round(4 * math.log2(noise.factor)), noise.duplicated
        found.setdefault(None if noise.factor == 1 else octave, []).append((param, noise))
    return found.values()


def _check_holds_none(optimizer: Optimizer) -> None:
    """An optimizer that steps others, such as ``ZeroRedundancyOptimizer``, has copies of their
    groups."""
    for name, value in vars(optimizer).items():
        held = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(each, Optimizer) for each in held):
            raise ValueError(
                f"{type(optimizer).__name__} steps the optimizers in its attribute {name!r}: call "
                "keep_rates for each of those instead"
            )


def _warn_of_few_bits(optimizer: Optimizer, noise: NoiseFactors) -> None:
    """Muon and Lion turn gradients into steps of one size, and the noise of 1 bit with them."""
    names = [cls.__name__ for cls in type(optimizer).__mro__]
    names = [name for name in names if name == "Lion" or "muon" in name.lower()]
    known = noise.by_parameter() if names else {}
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    few = sum(known[p].in_a_bit for p in held & known.keys())
    if few:
        warn(
            f"{names[0]} holds {few} parameters whose gradients are sent in 1 bit, "
            "and loses a few percent with them: send these in 2 bits, as policy 'two-bit' does "
            "(docs/policies.md, Muon and Lion)"
        )


def divides_by_second_moment(optimizer: Optimizer, given: bool | None) -> bool:
    """Whether an optimizer's steps shrink by the factor by which noise enlarges the gradients."""
    if given is not None:
        return given
    names = [cls.__name__ for cls in type(optimizer).__mro__]
    if any(n in _DO_NOT for n in names):
        return False
    # Some have groups for Muon and groups for Adam.
    if any(n in _DIVIDE or ("adam" in n.lower() and "muon" not in n.lower()) for n in names):
        return True
    raise ValueError(
        f"tagc does not know whether {names[0]} divides by the RMS of a gradient, as Adam does: "
        "pass keep_rates(optimizer, second_moment=True), or False if it does not"
    )


def _decays_apart(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether weight decay is decoupled: multiplied by the rate, not part of the gradient."""
    if "weight_decay" not in group:
        return False
    names = [cls.__name__.lower() for cls in type(optimizer).__mro__]
    known = {"adafactor", "radamschedulefree"}
    apart = any("adamw" in name or name in known for name in names)
    apart = apart or getattr(optimizer, "adam_w_mode", False)  # FusedAdam of apex and DeepSpeed
    return bool(group.get("decoupled_weight_decay", apart))


def clip_grad_norm(model: nn.Module, noise: NoiseFactors, max_norm: float) -> Tensor:
    """See :meth:`tagc.Compressor.clip_grad_norm_`."""
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ValueError(
            "FSDP1's gradients are shards that look like whole ones: clip with its own "
            "model.clip_grad_norm_, at a limit for the policy's noise (norm_factor)"
        )
    noise.agree()
    # Two norms for any number of segments, because each norm is a collective.
    known, params = noise.by_parameter(), [p for p in model.parameters() if p.grad is not None]
    measured = {id(p) for p in params if id(p) in known and known[id(p)].factor != 1}
    mean = _mean([known[p] for p in measured])
    mean = noise.over_parallel(mean)
    squares = []
    for factor, noisy in ((mean, True), (1.0, False)):
        some = [p.grad for p in params if p.grad is not None and (id(p) in measured) == noisy]
        if some:
            norm = nn.utils.get_total_norm(some)
            full = getattr(norm, "full_tensor", None)
            squares.append(((norm if full is None else full()) / factor) ** 2)
    total = (
        torch.stack(squares).sum().sqrt()
        if squares
        else torch.zeros((), dtype=torch.float32, device="cpu")
    )
    nn.utils.clip_grads_with_norm_(params, max_norm, total)
    return total
