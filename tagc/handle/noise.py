"""Measures the codecs' noise as a factor per parameter; corrects learning rates and clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from types import MethodType
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from tagc.attach import Unit
from tagc.basics.tracing import untraced
from tagc.basics.warn import warn
from tagc.collect import Transport, UnitReducer, noise_factor
from tagc.plan import UnitParam

_EVERY = 16
"""Ranks agree on factors at every power of two up to this many reductions, then at every multiple
of it."""

_DIVIDE = {"Adadelta", "Adafactor", "Adagrad", "Adamax", "RMSprop"}
_DO_NOT = {"ASGD", "LBFGS", "Lion", "Muon", "Rprop", "SGD"}

_KEPT: WeakSet[Optimizer] = WeakSet()
"""Optimizers whose rates are kept."""


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
            together = [(unit, made) for unit, made in due if unit.group is group]
            reducers = [r for _, made in together for r in made if r.gauge is not None]
            gauges = [r.gauge for r in reducers if r.gauge is not None]
            sums = torch.cat([gauge.sums for gauge in gauges]).to(together[0][0].device)
            for ranks in (group, self._replicas):
                if ranks is not None:
                    # Summed in the order of ranks, so the backend's algorithm does not matter.
                    sums = Transport(ranks).gather_values(sums)[0].sum(0)
            rows = sums.cpu().split([len(gauge.sums) for gauge in gauges])
            for reducer, gauge, row in zip(reducers, gauges, rows, strict=True):
                gauge.agreed.copy_(row)
                gauge.agreed_at.fill_(reducer.counters.compressed_steps)

    def by_parameter(self) -> dict[int, float]:
        """Factors of the parameters that an optimizer may hold, by ``id(parameter)``."""
        found: dict[int, float] = {}
        for unit, reducers in self._units:
            named, params, infos = _by_name(unit, reducers), unit.trainable(), unit.info.params
            if len(params) == len(infos):
                found |= {id(p): named[i.name] for p, i in zip(params, infos, strict=True)}
            else:  # one flat parameter
                mean = _mean([named[i.name] for i in infos], [math.prod(i.shape) for i in infos])
                found |= {id(p): mean for p in params}
        return found

    def infos(self) -> dict[int, UnitParam]:
        """What is known about the same parameters, except flat ones, by ``id(parameter)``."""
        pairs = [(unit.trainable(), unit.info.params) for unit, _ in self._units]
        pairs = [(params, infos) for params, infos in pairs if len(params) == len(infos)]
        return {id(p): i for params, infos in pairs for p, i in zip(params, infos, strict=True)}

    def over_parallel(self, mean: float) -> float | Tensor:
        """A mean factor, over tensor-parallel ranks too; they measure different parts of what they
        divide. Call it on all ranks."""
        groups = {id(group): (group, unit) for unit, _ in self._units for group in unit.parallel}
        found: float | Tensor = mean
        for group, unit in groups.values():
            mine = torch.as_tensor(found, dtype=torch.float32, device=unit.device)
            found = Transport(group).gather_values(mine)[0].log().mean().exp()
        return found

    def in_a_bit(self) -> set[int]:
        """Parameters, by ``id(parameter)``, whose gradients have codes of 1 bit."""
        found: set[int] = set()
        for unit, reducers in self._units:
            names = {
                param.name
                for reducer in reducers
                for segment in reducer.plan.compressed
                if segment.codec.nominal_bits == 1
                for param in segment.params
            }
            # A flat parameter has many of them; codes of so few bits refuse it.
            pairs = zip(unit.trainable(), unit.info.params, strict=False)
            found |= {id(p) for p, info in pairs if info.name in names}
        return found

    def mean(self) -> float:
        """Geometric mean over all elements with a factor other than 1; NaN without any."""
        named = [(unit.info.params, _by_name(unit, reducers)) for unit, reducers in self._units]
        pairs = [
            (factors[info.name], math.prod(info.shape))
            for infos, factors in named
            for info in infos
            if factors[info.name] != 1
        ]
        return _mean([f for f, _ in pairs], [n for _, n in pairs]) if pairs else math.nan


def _by_name(unit: Unit, reducers: Sequence[UnitReducer]) -> dict[str, float]:
    named = {info.name: 1.0 for info in unit.info.params}
    for reducer in reducers:
        if reducer.gauge is not None:
            for segment, squares in zip(reducer.plan.compressed, reducer.gauge.agreed, strict=True):
                factor = noise_factor(squares)
                named |= {p.name: named[p.name] * factor for p in segment.params}
    return named


def _is_due(reducer: UnitReducer) -> bool:
    """Whether ranks exchange the reducer's measurements."""
    gauge = reducer.gauge
    if gauge is None:
        return False
    return _stage(reducer.counters.compressed_steps) != _stage(int(gauge.agreed_at))


def _stage(steps: int) -> int:
    return steps.bit_length() if steps < _EVERY else _EVERY.bit_length() + steps // _EVERY


def _mean(factors: Sequence[float], weights: Sequence[int]) -> float:
    """Geometric mean, because factors multiply rates."""
    total = sum(weights)
    logs = sum(w * math.log(f) for f, w in zip(factors, weights, strict=True))
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
        # The user's groups, during a step; and the user's group of each part, the part, and its
        # values before the step.
        self._groups: list[dict[str, Any]] = []
        self._parts: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        self._removed = False
        self.factors = [1.0] * len(optimizer.param_groups)
        restore = untraced(self._restore)
        self._hooks = (
            optimizer.register_step_pre_hook(untraced(self._before)),
            optimizer.register_step_post_hook(lambda *_: restore()),
            optimizer.register_state_dict_pre_hook(lambda _: self._restore()),
        )
        self._step = self._restoring(optimizer.step, untraced(self._go_inside), restore)
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

    def _restoring(
        self,
        step: Callable[..., Any],
        go_inside: Callable[[], object],
        restore: Callable[[], object],
    ) -> Any:
        """``step``, but the user's rates are restored afterwards, even if it raises; torch then
        calls no hook. It is a method because torch's schedulers need one."""

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
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._cut()
        if callable(kwargs.get("closure")):
            kwargs = {**kwargs, "closure": self._outside(kwargs["closure"])}
        elif len(args) > 1 and callable(args[1]):
            args = (args[0], self._outside(args[1]), *args[2:])
        return args, kwargs

    def _outside(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """``closure``, which sees the user's groups; the rest of the step has its noise."""

        def outside() -> Any:
            self._restore()
            result = closure()
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
        factors, infos = self._noise.by_parameter(), self._noise.infos()
        groups, parts = list(optimizer.param_groups), []
        self.factors = [_mean_of(group["params"], factors, infos) for group in groups]
        for group in groups:
            every, whole = group["params"], _is_whole(group)
            for params in [every] if whole else _alike(every, factors, infos):
                factor = _mean_of(params, factors, infos)
                if whole:  # also what all tensor-parallel ranks have, which must stay the same
                    factor = float(self._noise.over_parallel(factor))
                part = {**group, "params": params, "lr": group["lr"] * factor}
                if _decays_apart(optimizer, group):
                    # Weights decay by rate times weight_decay, and this product must not change.
                    part["weight_decay"] = group["weight_decay"] / factor
                parts.append((group, part, dict(part)))
        self._groups, self._parts = groups, parts
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
        groups[:] = [*self._groups, *groups[len(self._parts) :]]
        self._groups, self._parts = [], []
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


def _alike(
    params: Sequence[nn.Parameter], factors: Mapping[int, float], infos: Mapping[int, UnitParam]
) -> Iterable[list[nn.Parameter]]:
    """Parameters whose factors differ by less than a quarter of an octave, or are 1. What all
    tensor-parallel ranks have whole is apart from what they divide: only its factors are the same
    on all of them."""
    found: dict[tuple[int | None, bool], list[nn.Parameter]] = {}
    for p in params:
        factor, info = factors.get(id(p), 1.0), infos.get(id(p))
        duplicated = factor != 1 and info is not None and info.duplicate is not None
        octave = None if factor == 1 else round(4 * math.log2(factor))
        found.setdefault((octave, duplicated), []).append(p)
    return found.values()


def _mean_of(
    params: Sequence[nn.Parameter], factors: Mapping[int, float], infos: Mapping[int, UnitParam]
) -> float:
    return _mean([factors.get(id(p), 1.0) for p in params], [_whole(p, infos) for p in params])


def _whole(p: nn.Parameter, infos: Mapping[int, UnitParam]) -> int:
    """Elements of a whole parameter. With FSDP1's ``use_orig_params``, ``p`` is a shard, whose size
    differs from rank to rank."""
    info = infos.get(id(p))
    return p.numel() if info is None else math.prod(info.shape)


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
    names = [name for name in names if name == "Lion" or _is_muon(name)]
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if names and (few := held & noise.in_a_bit()):
        warn(
            f"{names[0]} holds {len(few)} parameters whose gradients are sent in 1 bit, "
            "and loses a few percent with them: send these in 2 bits, as policy 'two-bit' does "
            "(docs/policies.md, Muon and Lion)"
        )


def _is_muon(name: str) -> bool:
    return "muon" in name.lower()


def divides_by_second_moment(optimizer: Optimizer, given: bool | None) -> bool:
    """Whether an optimizer's steps shrink by the factor by which noise enlarges the gradients."""
    if given is not None:
        return given
    names = [cls.__name__ for cls in type(optimizer).__mro__]
    if any(n in _DO_NOT for n in names):
        return False
    # Some have groups for Muon and groups for Adam.
    if any(n in _DIVIDE or ("adam" in n.lower() and not _is_muon(n)) for n in names):
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
    factors = noise.by_parameter()
    # Two norms for any number of segments, because each norm is a collective.
    measured: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    params = [p for p in model.parameters() if p.grad is not None]
    for p in params:
        (measured if factors.get(id(p), 1.0) != 1.0 else others).append(p)
    mean = _mean([factors[id(p)] for p in measured], [p.numel() for p in measured])
    mean = noise.over_parallel(mean)
    squares = []
    for factor, some in ((mean, measured), (1.0, others)):
        if some:
            norm = nn.utils.get_total_norm([p.grad for p in some if p.grad is not None])
            full = getattr(norm, "full_tensor", None)
            squares.append(((norm if full is None else full()) / factor) ** 2)
    total = (
        torch.stack(squares).sum().sqrt()
        if squares
        else torch.zeros((), dtype=torch.float32, device="cpu")
    )
    nn.utils.clip_grads_with_norm_(params, max_norm, total)
    return total
