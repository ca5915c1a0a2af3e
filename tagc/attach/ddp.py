"""DDP: the one file that knows ``DistributedDataParallel``'s internals.

DDP copies gradients into buckets, and calls a communication hook for each full bucket, in the same
order on all ranks. After the first step it makes new buckets, in the order in which gradients
arrived. So units here are not buckets but fixed sets of parameters, which depend on the model
alone: plans exist before training, and residuals do not move. The hook collects the gradients of a
unit from one or more buckets, reduces the unit when the last of them is there, and writes the
average back into the buckets. A bucket is done when all units with a parameter in it are.
"""

# No `from __future__ import annotations`: DDP reads the annotations of its hook.

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from tagc.attach.unit import Integration, Unit, already_wrapped, ranks_of
from tagc.attach.whole import (
    Named,
    check_policy,
    info_of_set,
    parameter_sets,
    reduce_whole,
    whole_on_hosts,
)
from tagc.collect import CollectiveWork, Transport, UnitReducer
from tagc.collect.transport import failing_in
from tagc.plan import UnitInfo, as_list
from tagc.policy.roles import plain_name

UNIT_BYTES = 25 * 2**20
"""Gradients of a unit, unless one parameter has more: as many as of DDP's buckets by default."""

# Of a DistributedDataParallel: the state of tagc's hook.
_ATTRIBUTE = "_tagc_hook"


@dataclass(frozen=True, kw_only=True)
class DDPUnit(Unit):
    """Parameters of one ``DistributedDataParallel`` whose gradients are reduced together."""

    # DDP holds its hook, and so the units, where Python's garbage collector does not look.
    _module: Callable[[], DistributedDataParallel | None]
    _params: Sequence[nn.Parameter]

    def install(self, reducer: UnitReducer) -> None:
        module = self._module()
        assert module is not None
        hook = getattr(module, _ATTRIBUTE, None)
        if hook is None:
            hook = _Hook(module)
            module.register_comm_hook(hook, _Hook.reduce)
            # DDP's list only notes it, and a copy of the module would take it over.
            module._comm_hooks.remove((_Hook.reduce, hook))
            object.__setattr__(module, _ATTRIBUTE, hook)
        may_be_unused = module.find_unused_parameters or module.static_graph
        hook.add(_Collected(self, reducer, may_be_unused=may_be_unused))

    def restore(self) -> None:
        """See :meth:`Unit.restore`. DDP keeps a hook forever, so from now on tagc's hook does what
        DDP does without one."""
        module = self._module()
        hook = None if module is None else getattr(module, _ATTRIBUTE, None)
        if hook is not None:
            hook.clear()

    def trainable(self) -> list[nn.Parameter]:
        return list(self._params)


class _Collected:
    """The gradients of one unit that have arrived in this backward."""

    def __init__(self, unit: DDPUnit, reducer: UnitReducer, *, may_be_unused: bool) -> None:
        self.unit, self.reducer = unit, reducer
        # In their buckets, by the index of the parameter in the unit.
        self.views: dict[int, Tensor] = {}
        # What backwards reached since the last reduction; None if DDP expects all in each. DDP has
        # such a map itself, but locks it while it calls its hook.
        self._used: set[int] | None = None
        self._hooks = []
        if may_be_unused:
            # What earlier backwards left in gradients, in `no_sync`, is used.
            used = {i for i, param in enumerate(unit._params) if param.grad is not None}
            # They run before DDP's own, so that a bucket comes after the notes on all it contains.
            # Hooks must not hold their parameters.
            self._hooks = [
                param.register_post_accumulate_grad_hook(lambda _, i=i: used.add(i))
                for i, param in enumerate(unit._params)
            ]
            self._used = used

    def used_on_any_rank(self, used: set[int]) -> list[bool]:
        """Which parameters any rank used, the same on all ranks; then start over."""
        mine = [i in used for i in range(len(self.unit._params))]
        used.clear()
        found = torch.tensor(mine, dtype=torch.int32, device=self.unit.device)
        with failing_in("agreeing on used parameters", self.unit.group):
            Transport(self.unit.group).all_reduce(found).wait()
        return found.bool().tolist()

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def reduce(self) -> None:
        """Replace the gradients by their average over all ranks."""
        views = [self.views[i] for i in range(len(self.views))]
        self.views.clear()
        names = None
        if self._used is not None:
            # DDP leaves `.grad` of a parameter that no rank used alone, so its residual must not be
            # sent, whatever an earlier backward left in the bucket.
            used = self.used_on_any_rank(self._used)
            if not any(used):
                return
            if not all(used):
                pairs = list(zip(self.unit.info.params, used, strict=True))
                names = {param.name for param, is_used in pairs if is_used}
                views = [view for view, is_used in zip(views, used, strict=True) if is_used]
        op = dist.ReduceOp.AVG
        reduce_whole(self.reducer, views, self.unit.group, op, _average, reached=names)


def _average(
    out: Tensor, inp: Tensor, transport: Transport, op: dist.ReduceOp.RedOpType
) -> CollectiveWork:
    """Average as DDP does: divide, then sum, in place."""
    return transport.all_reduce(out.div_(transport.size))


class _Hook:
    """The state of one ``DistributedDataParallel``'s hook, which lives as long as that does."""

    def __init__(self, module: DistributedDataParallel) -> None:
        self._module, self._group = weakref.ref(module), _group_of(module)
        device = next(module.module.parameters()).device
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.units: list[_Collected] = []
        self.clear()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # A copy of the module averages as DDP does.
        return type(None), ()

    def add(self, collected: _Collected) -> None:
        """From now on, reduce this unit."""
        at = len(self.units)
        self.units.append(collected)
        self._places |= {id(p): (at, i) for i, p in enumerate(collected.unit._params)}

    def clear(self) -> None:
        """From now on, reduce as DDP does."""
        for unit in self.units:
            unit.remove_hooks()
        self.units = []
        # Of each parameter: its unit, and its index there.
        self._places: dict[int, tuple[int, int]] = {}
        self._waiting: list[tuple[set[int], Future[Tensor], Tensor]] = []

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """DDP's communication hook: take in a bucket, reduce the units that it completes."""
        _check_join(self._module())
        if not self.units:
            return allreduce_hook(self._group, bucket)
        with self._beside_backward():
            mine = set()
            for param, view in gradients_of(bucket):
                if id(param) not in self._places:
                    raise _changed(f"a parameter of shape {list(param.shape)}")
                at, i = self._places[id(param)]
                self.units[at].views[i] = view
                mine.add(at)
            done: Future[Tensor] = Future(devices=[self._device] if self._stream else [])
            self._waiting.append((mine, done, bucket.buffer()))
            for at in sorted(mine):
                unit = self.units[at]
                if len(unit.views) == len(unit.unit._params):
                    unit.reduce()
                    for units, _, _ in self._waiting:
                        units.discard(at)
            waiting = self._waiting
            self._waiting = [bucket for bucket in waiting if bucket[0]]
            for units, completed, buffer in waiting:
                if not units:
                    completed.set_result(buffer)
        if bucket.is_last() and self._waiting:
            pairs = [(u, i) for u in self.units if u.views for i in range(len(u.unit._params))]
            missing = [u.unit.info.params[i].name for u, i in pairs if i not in u.views]
            raise _changed(as_list(missing))
        return done

    def _beside_backward(self) -> AbstractContextManager[Any]:
        """On a GPU, a stream of its own, behind the backward so far."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)


def gradients_of(bucket: dist.GradBucket) -> Iterator[tuple[Tensor, Tensor]]:
    """The parameters of a bucket that have elements, each with its gradient in the bucket.

    DDP's own views, ``bucket.gradients()``, are half of a complex gradient, and have another order
    of elements than a parameter that is dense in memory but not contiguous (``channels_last``).
    """
    at, buffer = 0, bucket.buffer()
    for param in bucket.parameters():
        if param.is_complex() and not buffer.is_complex():
            buffer = torch.view_as_complex(buffer.view(-1, 2))
        flat = buffer[at : at + param.numel()]
        at += param.numel()
        if not param.numel():
            continue
        layout = param.stride()
        # As DDP lays it out: like a parameter without gaps, otherwise contiguous.
        if not param.is_contiguous() and torch.empty_like(param, device="meta").stride() == layout:
            yield param, flat.as_strided(param.shape, layout, flat.storage_offset())
        else:
            yield param, flat.view(param.shape)
    if at != buffer.numel():
        raise RuntimeError(
            f"tagc: this torch's DDP has buckets of {buffer.numel()} elements for parameters of "
            f"{at}, which tagc does not know; leave tagc out, and tell us"
        )


def _check_join(module: Any) -> None:
    """Refuse to divide by the ranks that still have data: like torch's own hooks, tagc's divides by
    all, and ranks know no other number here."""
    if module._join_config.enable and not getattr(module, "_divide_by_initial_world_size", True):
        raise RuntimeError(
            "tagc: DDP.join(divide_by_initial_world_size=False) divides by the ranks that still "
            "have data, but a communication hook divides by all ranks: call join() without it"
        )


def _changed(what: str) -> RuntimeError:
    return RuntimeError(
        f"tagc: {what} was frozen, thawed or replaced after DDP or tagc.wrap saw the model; "
        "make such changes before DistributedDataParallel(...) and tagc.wrap"
    )


def _modules(model: nn.Module) -> Iterator[tuple[str, DistributedDataParallel]]:
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            yield name, module


def _group_of(module: DistributedDataParallel) -> dist.ProcessGroup:
    group = module.process_group
    assert isinstance(group, dist.ProcessGroup)
    return group


def find_units(model: nn.Module) -> list[Unit]:
    """The units of a model: its trainable parameters in their own order, at most ``UNIT_BYTES`` of
    one dtype and device each. A unit is named after its first parameter."""
    units: list[Unit] = []
    for name, module in _modules(model):
        _check(name or "the model", module)
        group = _group_of(module)
        for named in parameter_sets(_named_params(name, module), UNIT_BYTES):
            params = [param for _, param in named]
            unit = DDPUnit(
                info=info_of_set(named, group.size()),
                group=group,
                device=params[0].device,
                _module=weakref.ref(module),
                _params=params,
            )
            units.append(unit)
    return units


def _check(name: str, module: DistributedDataParallel) -> None:
    if (hook := getattr(module, _ATTRIBUTE, None)) is not None and hook.units:
        raise already_wrapped(repr(name))
    found: dict[str, Any] = module._get_ddp_logging_data()
    if hook is None and (other := found.get("comm_hook", "")):
        raise ValueError(
            f"{name!r} has its own communication hook ({other}). DDP has one hook, and tagc needs "
            "it: register none"
        )
    options = {
        "delay_all_reduce_named_params=...": bool(module._delay_all_reduce_params),
        # Since torch 2.13
        "skip_all_reduce_unused_params=True": getattr(
            module, "skip_all_reduce_unused_params", False
        ),
        "torch._dynamo.config.optimize_ddp = 'python_reducer'": module._use_python_reducer,
        "an optimizer in its backward (_apply_optimizer_in_backward)": any(
            hasattr(param, "_in_backward_optimizers") for param in module.parameters()
        ),
    }
    for option in (option for option, is_set in options.items() if is_set):
        raise ValueError(
            f"{name!r} is a DistributedDataParallel with {option}, which keeps gradients from its "
            "communication hook; leave that out"
        )
    sparse = [n for n, m in module.module.named_modules() if getattr(m, "sparse", False) is True]
    if sparse:
        raise ValueError(
            f"{name!r} has sparse gradients ({as_list(sparse)}), which DDP reduces apart; make "
            "these layers with sparse=False"
        )


def _named_params(name: str, module: DistributedDataParallel) -> Iterator[Named]:
    """The parameters that DDP keeps equal, by their names in the model as written. DDP ignores a
    parameter that has several names if all of them are ignored, and never one of the module itself.
    """
    prefix, found = f"{name}." if name else "", set()
    for path, part in module.module.named_modules():
        for own, param in part.named_parameters(recurse=False):
            if f"{path}.{own}" not in module.parameters_to_ignore and id(param) not in found:
                found.add(id(param))
                yield plain_name(prefix + f"{path}.{own}".removeprefix(".")), param


def whole_params(model: nn.Module) -> tuple[list[Named], dist.ProcessGroup]:
    """All parameters that DDP keeps equal in a model, if over one group, and that group."""
    modules = [*_modules(model)]
    named = [found for name, module in modules for found in _named_params(name, module)]
    groups = {ranks_of(_group_of(m)): _group_of(m) for _, m in modules}
    if len(groups) > 1:
        raise ValueError("the model's modules are data parallel over different ranks")
    return named, next(iter(groups.values()))


def planned_units(named: Iterable[Named], world_size: int, ranks_per_host: int) -> list[UnitInfo]:
    """The units of a model with these parameters, on any device, in ``DistributedDataParallel``."""
    sets = parameter_sets(named, UNIT_BYTES)
    return [whole_on_hosts(info_of_set(params, world_size), ranks_per_host) for params in sets]


DDP = Integration(
    name="DDP",
    description="DDP (DistributedDataParallel)",
    shards=lambda model: any(True for _ in _modules(model)),
    sharding_groups=lambda model: [_group_of(module) for _, module in _modules(model)],
    find_units=find_units,
    check_policy=check_policy,
)
