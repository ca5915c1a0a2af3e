"""Sites: the outer steps against a loop of their own, in plain torch."""

from __future__ import annotations

import gc
import time
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tagc
from support.conservation import Accounts
from support.distributed import fails, on_ranks
from support.exact import equal
from support.site_net import FOUR_BITS, adam, in_sites, inside, policy, train
from support.small_net import Net, local_weights, net
from support.units import gathered
from tagc.collect.transport import Transport
from tagc.ops.launches import Dequantize
from tagc.site.anchor import Anchor


def eager(
    sites: int, steps: int, every: int = 3, delay: int = 0, alpha: float = 0.0, **more: Any
) -> list[Net]:
    """The sites' models, trained one after another, and exchanged uncompressed.

    Args:
        more: ``parts``: names of the parameters in each fragment; ``together``: see the policy.
    """
    models = [net() for _ in range(sites)]
    optimizers = [adam(model) for model in models]
    anchor = net()
    parts = more.get("parts", [[name for name, _ in anchor.named_parameters()]])
    outer = [
        torch.optim.SGD(map(anchor.get_parameter, part), lr=0.7, momentum=0.9, nesterov=True)
        for part in parts
    ]
    for step in range(1, steps + 1):
        for site, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            train(model, optimizer, site, range(step - 1, step))
        for i, part in enumerate(parts):
            due = (i + 1) * every // len(parts)
            for name in part:
                value = anchor.get_parameter(name)
                if step <= more.get("together", 0):
                    mine = [value.detach() - m.get_parameter(name).detach() for m in models]
                    with torch.no_grad():
                        value.sub_(torch.stack(mine).sum(0).div_(sites))
                        for model in models:
                            model.get_parameter(name).copy_(value)
                elif step % every == due % every:
                    mine = [value.detach() - m.get_parameter(name).detach() for m in models]
                    value.grad = torch.stack(mine).sum(0).div_(sites)
            began = step - delay
            if began > more.get("together", 0) and began >= due and began % every == due % every:
                outer[i].step()
                for name in part:
                    for model in models:
                        own = model.get_parameter(name).detach()
                        own.copy_(own.lerp(anchor.get_parameter(name).detach(), 1 - alpha))
    return models


def weights_of(model: nn.Module, shard: int, shards: int) -> dict[str, Tensor]:
    """What FSDP would give a rank of the model's parameters."""
    found = {}
    for name, param in model.named_parameters():
        size = -(-param.shape[0] // shards)
        found[name] = param.detach()[shard * size : (shard + 1) * size]
    return found


@on_ranks(2, 3)
def test_dense_is_diloco(rank: int, world_size: int) -> None:
    """To the bit for 2 sites; the backend adds 3 numbers in an order of its own."""
    model, optimizer, handle = in_sites(policy())
    train(model, optimizer, rank, range(8))
    expected = local_weights(eager(world_size, 8)[rank])
    if world_size == 2:
        equal(local_weights(model), expected)
    else:
        torch.testing.assert_close(local_weights(model), expected, rtol=1e-5, atol=1e-6)
    metrics = handle.metrics()
    assert (metrics.steps, metrics.exchanges, metrics.waited) == (8, 2, 2)
    # Two exchanges in eight steps; Thirds of a byte are not counted.
    assert abs(metrics.wire_bytes * 4 - metrics.dense_bytes) < 16


@on_ranks(4)
@pytest.mark.parametrize("kind", ["FSDP2", "DDP"])
def test_shards_of_a_site(rank: int, world_size: int, kind: str) -> None:
    """Ranks of a site exchange what they hold of it, each with its counterpart."""
    model, sites, site = inside(kind, rank, world_size)
    optimizer = adam(model)
    handle = tagc.sites(model, optimizer, policy(), sites=sites)
    train(model, optimizer, site, range(4))
    trained = eager(2, 4)[site]
    if kind == "DDP":
        equal(local_weights(model.module), local_weights(trained))  # type: ignore[arg-type]
    else:
        equal(local_weights(model), weights_of(trained, rank % 2, 2))
    # Each rank sent half of the model, but for padding.
    numel = sum(param.numel() for param in net().parameters())
    assert numel / 2 <= handle.metrics().wire_bytes / 4 < numel / 2 + 100


@on_ranks(2)
@pytest.mark.parametrize(
    "config",
    [
        {"every": 6, "fragments": 3, "delay": 1},
        {"every": 5, "fragments": 2},
        {"every": 4, "together": 5, "delay": 2, "alpha": 0.25},
    ],
    ids=["fragments and delay", "fragments", "together at first"],
)
def test_staggered_and_delayed(rank: int, world_size: int, config: dict[str, Any]) -> None:
    model, optimizer, handle = in_sites(policy(**config))
    names = [[param.name for param in unit.info.params] for unit in handle.plan().units]
    parts: list[list[str]] = [[] for _ in range(config.get("fragments", 1))]
    for unit in names:
        min(parts, key=lambda part: sum(net().get_parameter(n).numel() for n in part)).extend(unit)
    assert all(parts)
    train(model, optimizer, rank, range(15))
    equal(local_weights(model), local_weights(eager(2, 15, parts=parts, **config)[rank]))


WEIGHTS = {"name": ["first.*.weight", "second.*.weight"]}
CODECS: dict[str, dict[str, Any]] = {
    "4 bits": FOUR_BITS,
    "1 bit": {
        "when": WEIGHTS,
        "codec": {"kind": "matrix", "bits": 1},
        "feedback": {"kind": "residual", "lead": 0.5},
    },
    "sketch": {"when": WEIGHTS, "codec": {"kind": "sketch", "density": 0.2, "warmup_steps": 1}},
}


def entering(anchor: Anchor, sites: int) -> Accounts:
    """The accounts of a unit, which note every exchange."""
    accounts, averaging = Accounts(anchor.reducer, owner_unit=sites), anchor.averaging

    def noted(*args: int) -> Iterator[None]:
        assert anchor.change is not None
        came_in = gathered(anchor.change)[:, None]
        yield from averaging(*args)
        accounts.enter(came_in, anchor.change.double() * sites)

    anchor.averaging = noted  # type: ignore[method-assign]
    return accounts


@on_ranks()
@pytest.mark.parametrize(("world_size", "codec"), [(2, "4 bits"), (3, "1 bit"), (2, "sketch")])
def test_nothing_is_lost(rank: int, world_size: int, codec: str) -> None:
    """What was handed out plus what is owed is the sum of all changes, and all anchors agree; of
    several units, which take turns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tagc.attach.ddp.UNIT_BYTES", 64)
        model, optimizer, handle = in_sites(policy(CODECS[codec], every=2))
    anchors = handle.exchange_state.anchors
    assert len(anchors) > 2
    for anchor in anchors:
        entering(anchor, world_size)
    train(model, optimizer, rank, range(6))
    assert handle.metrics().residual_norm > 0
    for anchor in anchors:
        for other in gathered(anchor.values):
            assert torch.equal(anchor.values, other)


@on_ranks(3)
def test_no_unit_waits_for_another(rank: int, world_size: int) -> None:
    """The first messages of all units are sent before any unit has an average."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tagc.attach.ddp.UNIT_BYTES", 64)
        model, optimizer, handle = in_sites(policy(FOUR_BITS, every=2))
    train(model, optimizer, rank, range(1))
    events: list[str] = []

    def noting(event: str, function: Any) -> Any:
        return lambda *args, **how: (events.append(event), function(*args, **how))[1]

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_to_all", "gather"):
            patch.setattr(Transport, name, noting("sent", getattr(Transport, name)))
        bound = Dequantize.bound
        patch.setattr(Dequantize, "bound", lambda *args: noting("decoded", bound(*args)))
        train(model, optimizer, rank, range(1))
    units = sum(bool(unit.compressed) for unit in handle.plan().units)
    assert units > 1
    assert events.index("decoded") == 1 + units  # the marks come first


@on_ranks(2)
def test_an_exchange_at_the_end(rank: int, world_size: int) -> None:
    """It also lands what is in flight; afterwards all sites have the same parameters."""
    model, optimizer, handle = in_sites(policy(FOUR_BITS, every=4, delay=2, alpha=0.5))
    train(model, optimizer, rank, range(5))
    handle.exchange()
    for weight in local_weights(model).values():
        assert all(torch.equal(weight, other) for other in gathered(weight))
    assert handle.metrics().exchanges == 2
    handle.remove()
    before = handle.metrics()
    train(model, optimizer, rank, range(8))
    assert handle.metrics() == before
    alive = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert alive() is None  # while the handle and the model live


@on_ranks(2)
def test_different_anchors_are_an_error(rank: int, world_size: int) -> None:
    model, optimizer, handle = in_sites(policy(every=2))
    train(model, optimizer, rank, range(2))
    handle.exchange_state.anchors[0].values[3] += rank
    train(model, optimizer, rank, range(1))
    kind, text = fails(lambda: train(model, optimizer, rank, range(1)))
    assert kind == "SitesDifferError"
    assert f"unit 'first.0.weight' (of 12 parameters) in site {rank} (after 1 exchanges, " in text
    assert "give every site the same checkpoint" in text


@on_ranks(2)
def test_an_exchange_by_the_mean_in_one_site_only_is_an_error(rank: int, world_size: int) -> None:
    """One of them has skipped the step that ends the mean."""
    model, optimizer, handle = in_sites(policy(every=4, together=2))
    train(model, optimizer, rank, range(3 - rank))
    kind, text = fails(handle.exchange)
    assert kind == "SitesDifferError"
    assert f"site {rank} is at an exchange() after {3 - rank} steps" in text


@on_ranks(2)
def test_different_parameters_at_the_start_are_an_error(rank: int, world_size: int) -> None:
    model = net()
    with torch.no_grad():
        model.head.bias.add_(rank)
    optimizer = adam(model)
    tagc.sites(model, optimizer, policy())
    kind, text = fails(lambda: train(model, optimizer, rank, range(1)))
    assert kind == "SitesDifferError"
    assert "All sites must begin with the same parameters" in text


@on_ranks(3)
@pytest.mark.parametrize(
    ("config", "due"),
    [({"every": 6, "fragments": 2}, " of fragment 2 of 2"), ({"every": 3, "delay": 1}, "")],
    ids=["fragments", "delay"],
)
def test_a_site_that_skipped_a_step(
    rank: int, world_size: int, config: dict[str, Any], due: str
) -> None:
    """As loss scalers do. If others are at an exchange when it asks for its last one, all raise."""
    model, optimizer, handle = in_sites(policy(FOUR_BITS, **config))
    train(model, optimizer, rank, range(5))
    began = time.monotonic()
    if rank == 1:
        kind, text = fails(handle.exchange)
    else:
        kind, text = fails(lambda: train(model, optimizer, rank, range(2)))
    assert kind == "SitesDifferError", text
    at = [f"the exchange{due} that is due after 6 steps", "an exchange() after 5 steps"]
    here, other = (1, 0) if rank == 1 else (rank, 1)
    assert f"site {here} is at {at[rank == 1]}, but site {other} at {at[rank != 1]}. Did" in text
    assert time.monotonic() - began < 10


@on_ranks(2)
def test_the_last_exchange_after_different_numbers_of_steps(rank: int, world_size: int) -> None:
    model, optimizer, handle = in_sites(policy(every=4, fragments=2))
    train(model, optimizer, rank, range(7 - rank))
    handle.exchange()
    for weight in local_weights(model).values():
        assert all(torch.equal(weight, other) for other in gathered(weight))


@on_ranks(2)
def test_a_late_exchange_is_waited_for(rank: int, world_size: int) -> None:
    """It changes no bit, and is counted."""
    model, optimizer, handle = in_sites(policy(every=4, delay=1))
    (anchor, *_) = handle.exchange_state.anchors
    averaging = anchor.averaging

    def late(*args: int) -> Iterator[None]:
        time.sleep(0.3)
        return averaging(*args)

    anchor.averaging = late  # type: ignore[method-assign]
    train(model, optimizer, rank, range(6))
    metrics = handle.metrics()
    assert (metrics.exchanges, metrics.waited) == (1, 1)
    assert metrics.wait_seconds > 0.1
    equal(local_weights(model), local_weights(eager(2, 6, every=4, delay=1)[rank]))


@on_ranks(2)
def test_what_fails_meanwhile_is_raised(rank: int, world_size: int) -> None:
    """In the step in which its average is due."""
    model, optimizer, handle = in_sites(policy(every=4, delay=2))

    def fail(*args: int) -> Iterator[None]:
        raise RuntimeError("the link is down")

    handle.exchange_state.anchors[0].averaging = fail  # type: ignore[method-assign]
    train(model, optimizer, rank, range(5))
    assert fails(lambda: train(model, optimizer, rank, range(1)))[1] == "the link is down"


@on_ranks(4)
def test_compressed_inside_a_site(rank: int, world_size: int) -> None:
    """By tagc.wrap, also with a copy of the parameters, which the exchange changes."""
    model, sites, site = inside("FSDP2", rank, world_size)
    when = {"name": ["first.*.weight", "second.*.weight"]}
    parameters = [{"when": when, "codec": {"kind": "delta", "bits": 8}}]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # units as small as these may send more when compressed
        tagc.wrap(model, {"schema": 1, "gradients": [FOUR_BITS], "parameters": parameters})
    optimizer = adam(model)
    handle = tagc.sites(model, optimizer, policy(every=2), sites=sites)
    train(model, optimizer, site, range(4))
    anchors = handle.exchange_state.anchors
    for anchor in anchors:
        both = [torch.empty_like(anchor.values) for _ in range(2)]
        torch.distributed.all_gather(both, anchor.values, group=sites.get_group())
        assert torch.equal(*both)
    # Right after an exchange the parameters are the anchors, and the next forward uses them.
    for anchor in anchors:
        assert torch.equal(anchor.unit.read(), anchor.values)
    params: dict[str, Any] = dict(model.named_parameters())
    exact = net()
    exact.load_state_dict({name: param.full_tensor() for name, param in params.items()})
    x = torch.ones(3, 7)
    torch.testing.assert_close(model(x), exact(x), rtol=0.02, atol=0.02)
