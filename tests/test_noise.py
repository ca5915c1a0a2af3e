"""Rates and limits that mean what they mean for dense gradients."""

from __future__ import annotations

import copy
import gc
import inspect
import itertools
import math
import warnings
import weakref
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import tagc
from support import fsdp1_net
from support.block_net import wrap
from support.distributed import on_ranks
from support.exact import equal
from support.marks import named
from support.parallel_net import loss_of as parallel_loss_of
from support.parallel_net import parallel
from support.small_net import local_grads, local_weights, loss_of, of_replicas, sharded, wrapped
from support.states import shared_folder
from support.units import codec_plan, unit_reducer
from tagc.handle.noise import (
    LearningRateScaling,
    Noise,
    NoiseFactors,
    _decays_apart,
    divides_by_second_moment,
)

BIT: dict[str, Any] = {
    "schema": 1,
    "gradients": [
        {
            "when": {"name": "*weight", "min_numel": 20},
            "codec": {"kind": "matrix", "bits": 1, "level": 1.3},
            "feedback": {"kind": "residual", "lead": 0.83},
        }
    ],
}


def groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]


class Seen(torch.optim.AdamW):
    """Writes down what a step saw."""

    seen: list[list[tuple[float, float]]]

    def step(self, closure: Any = None) -> None:
        self.seen[-1] = [(g["lr"], g["weight_decay"]) for g in self.param_groups]
        super().step(closure)


class Run:
    def __init__(self, policy: dict[str, Any]) -> None:
        self.model = tagc.wrap(sharded(), policy)
        self.compressor = tagc.compressor(self.model)
        self.optimizer = Seen(groups(self.model), lr=0.01)
        self.optimizer.seen = []

    def train(self, rank: int, steps: range) -> None:
        for step in steps:
            loss_of(self.model, rank, step).backward()
            self.optimizer.seen.append([])
            self.optimizer.step()
            self.optimizer.zero_grad()

    def set_factors(self, squares: tuple[float, float]) -> None:
        """As if all ranks had agreed on these."""
        for reducer in self.compressor.reducers:
            if reducer.gauge is None:
                continue
            reducer.gauge.agreed[:] = torch.tensor(squares, dtype=torch.float64)
            reducer.gauge.agreed_at.fill_(reducer.counters.compressed_steps)


@on_ranks(2)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_step_sees_the_factor_and_leaves_the_rate(rank: int, world_size: int) -> None:
    run = Run(BIT)
    kept = run.compressor.keep_rates(run.optimizer)
    run.train(rank, range(1))
    gauges = [r.gauge for r in run.compressor.reducers if r.plan.compressed]
    assert [gauge and int(gauge.agreed_at) for gauge in gauges] == [1] * 3
    # What matters here is what is done with factors: 9 / 1 is three times as large.
    run.set_factors((9.0, 1.0))
    loss_of(run.model, rank, 1).backward()
    run.set_factors((9.0, 1.0))
    run.optimizer.seen.append([])
    run.optimizer.step()
    numels = {n: p.numel() for n, p in run.model.named_parameters() if p.ndim > 1}
    small = numels["head.weight"]  # 11 elements, dense
    factor = 3 ** (1 - small / sum(numels.values()))
    assert kept.factors == pytest.approx([factor, 1.0])
    matrices, dense, vectors = run.optimizer.seen[-1]
    assert matrices == pytest.approx((0.03, 0.1 / 3))
    assert (dense, vectors) == ((0.01, 0.1), (0.01, 0.0))
    assert [(g["lr"], g["weight_decay"]) for g in run.optimizer.param_groups] == [
        (0.01, 0.1),
        (0.01, 0.0),
    ]
    with pytest.raises(ValueError, match="already kept"):
        run.compressor.keep_rates(run.optimizer)
    kept.remove()
    run.train(rank, range(2, 3))
    assert run.optimizer.seen[-1] == [(0.01, 0.1), (0.01, 0.0)]
    run.compressor.keep_rates(run.optimizer)


@on_ranks(2)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_factors_are_the_same_on_all_ranks_and_resume(rank: int, world_size: int) -> None:
    first = Run(BIT)
    kept = first.compressor.keep_rates(first.optimizer)
    first.train(rank, range(2))
    mine = kept.factors
    everybodys: list[Any] = [None] * world_size
    dist.all_gather_object(everybodys, mine)
    assert everybodys[0] == everybodys[1]
    assert mine[0] != 1
    with shared_folder() as folder:
        first.compressor.save(folder)
        second = Run(BIT)
        with pytest.warns(UserWarning, match=r"called compressor.keep_rates\(optimizer\), call it"):
            second.compressor.load(folder)
        # After loading or before: the factors are those of the run that saved.
        second.compressor.keep_rates(second.optimizer)
        before = Run(BIT)
        before.compressor.keep_rates(before.optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            before.compressor.load(folder)
    resumed = (second, before)
    for run in resumed:
        run.model.load_state_dict(first.model.state_dict())
        run.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    for run in (first, *resumed):
        run.train(rank, range(2, 4))
    for run in resumed:
        equal(local_weights(run.model), local_weights(first.model))
        assert run.optimizer.seen == first.optimizer.seen[2:]


@on_ranks(2)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_clipping_leaves_the_noise_out(rank: int, world_size: int) -> None:
    run = Run(BIT)
    run.compressor.clip_grad_norm_(1.0)  # before there is anything to clip
    for step in range(2):
        loss_of(run.model, rank, step).backward()
    run.set_factors((4.0, 1.0))
    before = local_grads(run.model)
    squares = torch.zeros(2, dtype=torch.float64)
    large = {n for n, p in run.model.named_parameters() if p.ndim > 1 and p.numel() >= 20}
    for name, grad in before.items():
        squares[int(name in large)] += grad.double().square().sum()
    dist.all_reduce(squares)
    expected = math.sqrt(squares[0] + squares[1] / 4)
    norm = run.compressor.clip_grad_norm_(expected / 2)
    # Norms are float32 sums of fewer than 2,000 squares.
    assert norm.item() == pytest.approx(expected, rel=1e-5)
    for name, grad in local_grads(run.model).items():
        torch.testing.assert_close(grad, before[name] / 2, rtol=1e-5, atol=1e-7)


NORMS = {
    "hybrid": (0.99, 1.01),
    "two-bit": (0.97, 1.03),
    "one-bit": (1.05, 1.1),
}
"""Of dense's, as docs/policies.md says."""


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("policy", NORMS)
@pytest.mark.parametrize("fresh", [False, True], ids=["repeated", "fresh"])
def test_the_norm_beside_denses(rank: int, world_size: int, policy: str, fresh: bool) -> None:
    model, dense = layers(), layers()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tagc.wrap(model, {"schema": 1, "extends": policy, "roles": {"mlp": "*"}})
    ratios = []
    for step in range(60):
        generator = torch.Generator().manual_seed(rank + (2 * step if fresh else 0))
        x = torch.randn(64, 64, generator=generator)
        for each in (model, dense):
            each.zero_grad()
            (each(x) - x).square().mean().backward()
        mine = tagc.compressor(model).clip_grad_norm_(1e9)
        grads = [p.grad for p in dense.parameters() if p.grad is not None]
        norm: Any = nn.utils.get_total_norm(grads)
        ratios.append(float(mine / norm.full_tensor()))
    least, most = NORMS[policy]
    assert least <= sum(ratios[-20:]) / 20 <= most


def layers() -> Any:
    torch.manual_seed(0)
    sizes = (64, 256, 256, 64)
    parts = [nn.Linear(n, m) for n, m in itertools.pairwise(sizes)]
    model = nn.Sequential(parts[0], nn.Tanh(), parts[1], nn.Tanh(), parts[2])
    for part in (*parts, model):
        fully_shard(part)
    return model


def test_which_optimizers_divide() -> None:
    p = [nn.Parameter(torch.zeros(2, 2))]
    assert divides_by_second_moment(torch.optim.RMSprop(p), None)
    assert not divides_by_second_moment(torch.optim.Muon(p), None)
    for name in ("Unknown", "MuonWithAuxAdam"):
        optimizer = type(name, (torch.optim.Optimizer,), {})(p, {})
        assert divides_by_second_moment(optimizer, True)
        with pytest.raises(ValueError, match=rf"whether {name} divides.*second_moment=True"):
            divides_by_second_moment(optimizer, None)


def test_a_gradient_that_goes_through_codecs_twice_has_the_noise_of_both() -> None:
    """Over the ranks that share the parameters, then over copies of the model."""
    plan = codec_plan(2, {"kind": "quantized"})
    params = [nn.Parameter(torch.zeros(1)) for _ in plan.info.params]
    unit: Any = SimpleNamespace(info=plan.info, trainable=lambda: params)
    reducers = unit_reducer(plan), unit_reducer(plan)
    noise = NoiseFactors([(unit, reducers)], None)
    for reducer, square in zip(reducers, (4.0, 9.0), strict=True):
        assert reducer.gauge is not None
        reducer.gauge.agreed[:] = torch.tensor((square, 1.0), dtype=torch.float64)
    a, b, c, d = (noise.by_parameter()[id(param)].factor for param in params)
    assert (a, b, c, d) == (6, 1, 6, 1)


@on_ranks(4)
def test_copies_of_the_model_take_the_same_steps(rank: int, world_size: int) -> None:
    """Whose gradients go through codecs twice."""
    rule = {
        "when": {"name": "*weight", "min_numel": 20},
        "codec": {"kind": "matrix"},
        "feedback": {"kind": "residual", "lead": 0.8},
    }
    model, replicas = wrapped({"gradients": [rule], "replicas": [rule]})
    compressor = tagc.compressor(model)
    optimizer = torch.optim.AdamW(groups(model), lr=0.01)
    kept = compressor.keep_rates(optimizer)
    for step in range(2):
        loss_of(model, rank, step).backward()
        compressor.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
    for weight in local_weights(model).values():
        one, other = of_replicas(weight, replicas)
        assert torch.equal(one, other)
    everybodys: list[Any] = [None] * world_size
    dist.all_gather_object(everybodys, kept.factors)
    assert everybodys == [everybodys[0]] * world_size
    assert kept.factors[0] != 1
    assert compressor.metrics().noise_factor != 1


@on_ranks(2)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_removed_or_lost_optimizers_free_their_state(rank: int, world_size: int) -> None:
    run = Run(BIT)
    with pytest.raises(ValueError, match="AdamW holds no parameter whose gradients"):
        run.compressor.keep_rates(stepping())
    for removed in (True, False):
        optimizer = torch.optim.AdamW(run.model.parameters())
        kept = run.compressor.keep_rates(optimizer)
        if removed:
            kept.remove()
        alive = weakref.ref(optimizer)
        del optimizer, kept
        gc.collect()
        assert alive() is None


@on_ranks(2)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_ranks_with_other_sizes_of_shards_have_the_same_rates(rank: int, world_size: int) -> None:
    """FSDP1's, of which ``torch.nn.utils`` cannot tell a norm either."""
    model = fsdp1_net.sharded(use_orig_params=True)
    rule = {"when": {"name": "*weight", "min_numel": 20}, "codec": {"kind": "quantized"}}
    wrap(model, {"schema": 1, "gradients": [rule]})
    compressor = tagc.compressor(model)
    optimizer = Seen(model.parameters(), lr=0.01)
    optimizer.seen = [[]]
    compressor.keep_rates(optimizer)
    loss_of(model, rank, 0).backward()
    with pytest.raises(ValueError, match=r"its own model.clip_grad_norm_"):
        compressor.clip_grad_norm_(1.0)
    optimizer.step()
    everybodys: list[Any] = [None] * world_size
    dist.all_gather_object(everybodys, optimizer.seen)
    assert everybodys[0] == everybodys[1]
    assert len(optimizer.seen[0]) > 1


@on_ranks(4)
@pytest.mark.parametrize("group_stays_whole", [False, True])
def test_what_tensor_parallel_ranks_have_whole_stays_the_same(
    rank: int, world_size: int, group_stays_whole: bool
) -> None:
    model = parallel(2, 2)
    model.head.requires_grad_(False)  # not a DTensor over the same mesh, which torch's norm needs
    rule = {"when": {"name": "*"}, "codec": {"kind": "quantized"}, "feedback": {"kind": "none"}}
    wrap(model, {"schema": 1, "roles": {"mlp": "*"}, "gradients": [rule]})
    compressor = tagc.compressor(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if group_stays_whole:
        optimizer.param_groups[0]["weight_sum"] = 0.0
    compressor.keep_rates(optimizer)
    for step in range(3):
        parallel_loss_of(model, rank // 2, step).backward()
        norm = compressor.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
    everybodys: list[Any] = [None] * world_size
    mine = float(norm), model.norm.weight.to_local().tolist()
    dist.all_gather_object(everybodys, mine)
    assert everybodys[rank] == everybodys[rank ^ 1]


# An optimizer whose rates are kept: what it has outside of its step is the user's


def noise_of(factors: dict[int, float] | None = None) -> Any:
    """The noise of parameters of one element; of gradients that are twice as large as dense ones if
    no ``factors`` are given."""
    known = {p: Noise(factor, 1) for p, factor in (factors or {}).items()}
    every = Mock(get=Mock(return_value=Noise(2.0, 1)))
    return Mock(by_parameter=lambda: every if factors is None else known, over_parallel=float)


def rates(optimizer: torch.optim.Optimizer) -> list[tuple[Any, Any]]:
    return [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups]


def stepping(**options: Any) -> Any:
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    return torch.optim.AdamW([p], lr=0.5, weight_decay=0.25, **options)


def failing() -> float:
    raise OSError("in the closure")


@pytest.mark.parametrize("scheduled", ["before", "after"])
def test_an_exception_in_a_step_leaves_the_users_rates(scheduled: str) -> None:
    optimizer = stepping()
    if scheduled == "before":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    kept = LearningRateScaling(optimizer, noise_of(), second_moment=None)
    if scheduled == "after":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    with pytest.raises(OSError, match="in the closure"):
        optimizer.step(failing)
    assert rates(optimizer) == [(0.5, 0.25)]
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.5
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.125})
    optimizer.param_groups[0]["lr"] = 0.0625
    optimizer.step()
    assert rates(optimizer) == [(0.0625, 0.25), (0.125, 0.25)]
    assert kept.factors == [2.0, 2.0]
    scheduler.step()
    assert rates(optimizer) == [(0.03125, 0.25), (0.0625, 0.25)]
    kept.remove()
    optimizer.step()
    assert copy.deepcopy(optimizer).param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


class Writing(torch.optim.SGD):
    """Adam by name, with a count in each group."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1


def test_each_parameter_has_its_own_factor() -> None:
    """Those that are alike in a group of the step, which others do not see afterwards."""
    params = [nn.Parameter(torch.zeros(1)) for _ in range(5)]
    factors = dict(zip(map(id, params), (1.0, 4.0, 1.01, 3.9), strict=False))
    optimizer = Writing([{"params": params[:4]}, {"params": params[4:], "lr": 0.5}], lr=1.0)
    held, groups = optimizer.param_groups, list(optimizer.param_groups)
    kept = LearningRateScaling(optimizer, noise_of(factors), second_moment=True)
    for p in params:
        p.grad = -torch.ones(1)
    optimizer.step()
    mean = math.sqrt(4 * 3.9)
    assert [p.item() for p in params] == pytest.approx([1, mean, 1.01, mean, 0.5])
    assert kept.factors == pytest.approx([(4 * 1.01 * 3.9) ** 0.25, 1.0])
    assert optimizer.param_groups is held
    assert all(mine is theirs for mine, theirs in zip(held, groups, strict=True))
    assert [(g["lr"], g["count"], len(g["params"])) for g in groups] == [(1.0, 1, 4), (0.5, 1, 1)]


@pytest.mark.parametrize("sums", [{"weight_sum": 0.0}, {"count": torch.tensor(0)}], ids=list)
def test_a_group_that_adds_up_has_one_factor(sums: dict[str, Any]) -> None:
    """Rates, as those of schedule-free optimizers; or its steps in a tensor, as apex's do."""
    params = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = Writing([{"params": params, **copy.deepcopy(sums)}], lr=1.0)
    noise = noise_of({id(params[0]): 4.0})
    LearningRateScaling(optimizer, noise, second_moment=True)
    for p in params:
        p.grad = -torch.ones(1)
    optimizer.step()
    assert [p.item() for p in params] == [2, 2]
    assert optimizer.param_groups[0]["count"] == 1


def test_an_empty_group_is_kept() -> None:
    optimizer = torch.optim.AdamW([{"params": []}])
    LearningRateScaling(optimizer, noise_of(), second_moment=None)
    optimizer.step()
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("order", ["before", "after"])
def test_hooks_and_closures_see_the_users_groups(order: str) -> None:
    """And leave the step its own."""
    params = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = Writing([{"params": params}], lr=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    states: list[Any] = []

    def look(*_: Any) -> None:
        states.append(optimizer.state_dict()["param_groups"])

    def hook() -> None:
        optimizer.register_step_pre_hook(look)
        optimizer.register_step_pre_hook(lambda *_: optimizer.param_groups[0].update(lr=1.0))
        optimizer.register_step_post_hook(look)
        optimizer.register_step_post_hook(lambda *_: scheduler.step())

    if order == "before":
        hook()
    LearningRateScaling(optimizer, noise_of({id(params[0]): 4.0}), second_moment=True)
    if order == "after":
        hook()

    def closure() -> None:
        look()
        for p in params:
            p.grad = -torch.ones(1)

    optimizer.step(closure)
    optimizer.step(closure=closure)
    assert [p.item() for p in params] == [8, 2]
    assert [[g["lr"] for g in groups] for groups in states] == [[0], [1], [1], [0], [1], [1]]


def test_a_step_that_changes_its_own_rates_is_refused() -> None:
    class Decaying(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                group["lr"] *= 0.5

    optimizer = Decaying([nn.Parameter(torch.zeros(1))], lr=1.0)
    LearningRateScaling(optimizer, noise_of(), second_moment=True)
    with pytest.raises(ValueError, match="Decaying changes lr of its groups in its own step"):
        optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 1


def test_a_step_without_arguments_keeps_its_signature() -> None:
    """GradScaler reads it."""

    class Bare(torch.optim.AdamW):
        def step(self) -> None: ...  # type: ignore[override]

    optimizer = Bare([nn.Parameter(torch.zeros(1))])
    LearningRateScaling(optimizer, noise_of(), second_moment=None)
    assert not inspect.signature(optimizer.step).parameters


def test_optimizers_with_other_optimizers_or_models_are_refused() -> None:
    optimizer = stepping()
    kept = LearningRateScaling(optimizer, noise_of(), second_moment=None)
    with pytest.raises(ValueError, match="give each model its own optimizer"):
        LearningRateScaling(optimizer, noise_of(), second_moment=None)
    kept.remove()
    optimizer.inner = [stepping()]
    with pytest.raises(ValueError, match="AdamW steps the optimizers in its attribute 'inner'"):
        LearningRateScaling(optimizer, noise_of(), second_moment=None)


def test_a_rate_that_is_a_tensor_stays_the_same_tensor() -> None:
    optimizer = stepping(foreach=False)
    rate = optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    LearningRateScaling(optimizer, noise_of(), second_moment=None)
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.5


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.Adam, {}),
        (torch.optim.Adam, {"decoupled_weight_decay": True}),
        (torch.optim.RMSprop, {}),
        (torch.optim.RAdam, {"decoupled_weight_decay": True}),
    ],
    ids=named,
)
def test_whether_a_decay_is_apart_is_what_the_optimizer_does(
    cls: Any, options: dict[str, Any]
) -> None:
    """Apart from the gradient it is the rate times the decay, and then it must not follow the
    factor."""
    p = nn.Parameter(torch.full((2, 2), 3.0))
    p.grad = torch.zeros(2, 2)
    optimizer = cls([p], lr=0.01, weight_decay=0.1, **options)
    for _ in range(10):  # in its first ones RAdam divides by nothing
        optimizer.step()
    left = p.detach()[0, 0].item() / 3
    apart = left == pytest.approx((1 - 0.01 * 0.1) ** 10, rel=1e-5)
    assert _decays_apart(optimizer, optimizer.param_groups[0]) == apart
    assert left < 1


@pytest.mark.parametrize(
    ("name", "mode", "apart"),
    [("FusedAdam", 0, False), ("FusedAdam", 1, True), ("RAdamScheduleFree", 0, True)],
)
def test_whether_a_decay_of_other_libraries_is_apart(name: str, mode: int, apart: bool) -> None:
    optimizer: Any = type(name, (torch.optim.Optimizer,), {"adam_w_mode": mode})(
        [nn.Parameter(torch.zeros(1))], {"weight_decay": 0.1}
    )
    assert _decays_apart(optimizer, optimizer.param_groups[0]) == apart


def test_an_optimizer_that_chooses_its_rates_is_refused() -> None:
    optimizer = stepping()
    optimizer.param_groups[0]["lr"] = None
    with pytest.raises(ValueError, match="group 0 of AdamW has no learning rate to keep"):
        LearningRateScaling(optimizer, noise_of(), second_moment=None)
    optimizer.param_groups[0].update(lr=0.1, relative_step=True)
    with pytest.raises(ValueError, match="relative_step=False"):
        LearningRateScaling(optimizer, noise_of(), second_moment=None)
