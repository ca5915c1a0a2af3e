"""``codec: auto``: chooses the fastest codecs for the link that ``tagc.wrap`` measures.

A rank's choice decides what it sends, so all ranks must choose from bit-identical numbers. Each
rank measures, then all take the slowest of every number. (A step waits for the slowest rank, too.)
A maximum does not depend on order, so ranks without a common group agree through ranks that share a
group with both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from tagc.codecs import CodecConfig, CodecPlan, PlanRequest, plan_codec
from tagc.codecs.dense import DenseConfig
from tagc.codecs.feedback import FeedbackRule, plan_feedback
from tagc.collect import HostGroups, Transport, agree_on
from tagc.costs.codec_time import CodecTime, Speed, measured_time
from tagc.costs.link import Link
from tagc.costs.model import unit_seconds
from tagc.costs.speed import measure_speeds
from tagc.ops import get_ops
from tagc.plan import AUTO_BITS, Choice, Direction, UnitPlan, config_inside, resolve_auto
from tagc.policy import Policy, Rule
from tagc.policy.rules import AutoConfig

# An option must take at most this share of a less compressed one's predicted seconds. Codecs are
# timed in a loop with warm caches, and links without other work; both are slower in a step.
WORTH = 0.7
# Seconds that a large exchange should take. Its size adapts: links differ by a factor of 1000.
_TARGET = 0.04
_FIRST_BYTES, _MAX_BYTES = 1 << 16, 1 << 26
_REPEATS, _SMALL_REPEATS = 5, 10


def is_automatic(policy: Policy) -> bool:
    """Whether the link decides the codec of any rule."""
    rules = (*policy.gradients, *policy.parameters, *policy.replicas)
    return any(isinstance(rule.codec, AutoConfig) for rule in rules)


@dataclass(frozen=True)
class FastestChoice:
    """Chooses the option that is clearly the fastest by prediction. See
    :class:`tagc.plan.choice.Choose`.

    Attributes:
        link_of_all: the link among all ranks of a unit whose other options use two levels; by
            default the same link.
    """

    link: Callable[[int, Direction], Link]
    time: CodecTime
    notes: tuple[str, ...] = ()
    micro_batches: int = 1
    link_of_all: Callable[[int], Link] | None = None

    def __call__(self, position: int, options: Sequence[UnitPlan]) -> Choice:
        levels = max(option.info.ranks_per_host for option in options)
        seconds = []
        for option in options:
            link = self.link(position, option.direction)
            if self.link_of_all is not None and option.info.ranks_per_host < levels:
                link = self.link_of_all(position)
            seconds.append(unit_seconds(option, link, self.time, self.micro_batches))
        index = 0
        for i, s in enumerate(seconds):
            if s <= WORTH * seconds[index]:
                index = i
        said = [f"{_label(o)} {_milliseconds(s)}" for o, s in zip(options, seconds, strict=True)]
        return Choice(index=index, why=f"{_label(options[index])}, out of {', '.join(said)}")


def measured_choice(
    links: Sequence[tuple[dist.ProcessGroup, torch.device]],
    ops: str | None,
    policy: Policy,
    *,
    dtype: torch.dtype = torch.float32,
    parameter_dtype: torch.dtype = torch.float32,
    replicas: dist.ProcessGroup | None = None,
    hosts: Sequence[HostGroups | None] = (),
    peers: Sequence[int] = (),
) -> FastestChoice:
    """Measure links and codecs, together with all other ranks, in about a second.

    Args:
        links: group and device of every unit, in the plan's order.
        ops: the implementation, see :func:`tagc.ops.get_ops`.
        policy: the policy whose codecs are timed.
        dtype: dtype of the gradients.
        parameter_dtype: dtype of the parameters in the all-gather.
        replicas: the group of the all-reduce across replicas.
        hosts: the host groups of every unit; None for a unit whose ranks do not add up inside hosts
            first. By default no ranks do.
        peers: numbers of ranks that exchange messages, in addition to the sizes of the groups.

    Raises:
        RuntimeError: if timing failed on another rank.
    """
    device = links[0][1]
    everywhere = [group for group, _ in links] + ([] if replicas is None else [replicas])
    groups = list({id(group): group for group in everywhere}.values())
    shared = list({id(levels): levels for levels in hosts if levels is not None}.values())
    # Groups of all hosts measure at the same time, because they share the hosts' links in a step.
    between = [group for levels in shared for group in (levels.across, levels.inside)]

    def time_codecs() -> tuple[dict[str, Speed], str]:
        implementation = get_ops(device, ops)
        speeds: dict[str, Speed] = {}
        # Symbols depend on the number of ranks.
        for W in {*peers, *(group.size() for group in (*groups, *between))}:
            sent = codecs_of(policy, dtype, W, parameters=False)
            gathered = codecs_of(policy, parameter_dtype, W, parameters=True)
            speeds |= measure_speeds(sent, implementation, device, dtype)
            speeds |= measure_speeds(gathered, implementation, device, parameter_dtype)
        return speeds, ""

    # An error on one rank is raised on all. Speeds may differ between ranks.
    speeds = agree_on(groups, {"speed of codecs": time_codecs})["speed of codecs"]
    measured = [measure_link(group, device) for group in (*groups, *between)]
    keys = sorted(speeds)
    mine = [
        number
        for link in measured
        for number in (1 / link.bandwidth, link.latency, link.reduce_scatter, link.all_gather)
    ]
    mine += [n for key in keys for n in (speeds[key].encode, speeds[key].decode)]
    agreed = slowest(mine, groups)

    agreed_links = {}
    for i, group in enumerate((*groups, *between)):
        per_byte, latency, reducing, gathering = agreed[4 * i : 4 * i + 4]
        agreed_links[id(group)] = Link(
            bandwidth=1 / per_byte,
            latency=latency,
            reduce_scatter=reducing,
            all_gather=gathering,
        )
    for levels in shared:
        across, inside = (agreed_links[id(group)] for group in (levels.across, levels.inside))
        # A step waits for both, one after the other.
        agreed_links[id(levels)] = replace(
            across, latency=(across.latency + inside.latency) / 2, inside=inside.bandwidth
        )
    rest = agreed[4 * len(measured) :]
    agreed_speeds = {
        key: Speed(encode=rest[2 * i], decode=rest[2 * i + 1]) for i, key in enumerate(keys)
    }

    def link_of(position: int, direction: Direction) -> Link:
        if direction == "replicas" and replicas is not None:
            return agreed_links[id(replicas)]
        levels = hosts[position] if hosts else None
        return agreed_links[id(links[position][0] if levels is None else levels)]

    notes = [
        f"measured over {group.size()} ranks{of}: {_describe(agreed_links[id(group)])}"
        for group, of in (
            *((group, "") for group in groups),
            *((levels.across, ", one per host") for levels in shared),
            *((levels.inside, " of a host") for levels in shared),
        )
        if group.size() > 1
    ]
    notes += [_describe_speeds(agreed_speeds)]
    return FastestChoice(
        link_of,
        measured_time(agreed_speeds),
        tuple(notes),
        link_of_all=lambda position: agreed_links[id(links[position][0])],
    )


def measure_link(group: dist.ProcessGroup, device: torch.device) -> Link:
    """Measure an all-to-all, and the backend's own collectives relative to it.

    All ranks of the group call it together. Each gets its own numbers.
    """
    transport = Transport(group)
    W = transport.size
    if W == 1:
        return Link(bandwidth=1e12)

    def exchange(numel: int) -> Callable[[], object]:
        send = torch.zeros(W, numel, dtype=torch.int32, device=device)
        received = torch.empty_like(send)
        return lambda: transport.all_to_all(received, send).wait()

    def reduce(numel: int) -> Callable[[], object]:
        send = torch.zeros(W * numel, dtype=torch.float32, device=device)
        out = torch.empty(numel, dtype=torch.float32, device=device)
        return lambda: transport.reduce_scatter(out, send, dist.ReduceOp.SUM).wait()

    def gather(numel: int) -> Callable[[], object]:
        send = torch.zeros(numel, dtype=torch.float32, device=device)
        out = torch.empty(W * numel, dtype=torch.float32, device=device)
        return lambda: transport.all_gather(out, send)

    # Take the fastest of all repeats: other load on the machine only adds time.
    latency = min(_seconds(exchange(1), device, _SMALL_REPEATS))
    numel = _FIRST_BYTES // (4 * W) or 1
    # The size must be the same on all ranks.
    (first,) = slowest([min(_seconds(exchange(numel), device, 3))], [group])
    growth = max(1.0, _TARGET / max(first, 1e-9))
    numel = int(min(numel * growth, _MAX_BYTES // (4 * W)))
    sent = 4 * numel * (W - 1)
    # All three send the same number of bytes.
    large, reducing, gathering = (
        _without(latency, min(_seconds(make(numel), device, _REPEATS)))
        for make in (exchange, reduce, gather)
    )
    return Link(
        bandwidth=sent / large,
        latency=latency,
        reduce_scatter=reducing / large,
        all_gather=gathering / large,
    )


def _without(latency: float, seconds: float) -> float:
    """Seconds that the bytes take: at least half of ``seconds``, because latency is noisy."""
    return max(seconds - latency, seconds / 2)


def slowest(numbers: Sequence[float], groups: Sequence[dist.ProcessGroup]) -> list[float]:
    """The maximum of each number over all ranks that the groups connect."""
    mine = list(numbers)
    # One pass spreads a number to all groups of a rank. The furthest rank is at most as many groups
    # away as there are groups.
    for _ in groups:
        for group in groups:
            said: list[list[float]] = [[] for _ in range(group.size())]
            # Objects rather than tensors: they keep float64 exactly on any backend.
            dist.all_gather_object(said, mine, group=group)
            mine = [max(column) for column in zip(*said, strict=True)]
    return mine


def _seconds(run: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Seconds of every call after the first, which sets up connections."""
    taken = []
    for i in range(repeats + 1):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if i:
            taken.append(time.perf_counter() - start)
    return taken


# Enough columns that any shared support has room, and so few that none has.
_COLUMNS = (1 << 24, 32)


def codecs_of(
    policy: Policy, dtype: torch.dtype, world_size: int, *, parameters: bool
) -> list[CodecPlan]:
    """Codecs to time: all that the rules may become, dense, and the codec inside hosts."""
    rules = policy.parameters if parameters else (*policy.gradients, *policy.replicas)
    pairs: list[tuple[CodecConfig, FeedbackRule | None]] = [(DenseConfig(), None)]
    if policy.inside != "native" and not parameters:
        pairs.append((config_inside(policy.inside), None))
    for rule in rules:
        feedback = plan_feedback(rule.feedback) if isinstance(rule, Rule) else None
        if isinstance(rule.codec, AutoConfig):
            # Include the options that store a copy.
            owes = feedback is not None
            pairs += [
                (resolve_auto(rule.codec, bits, copy_bytes=0, owes=owes), feedback)
                for bits in AUTO_BITS
            ]
        else:
            pairs.append((rule.codec, feedback))
    return [
        plan_codec(
            config,
            PlanRequest(
                columns=columns,
                world_size=world_size,
                dtype=dtype,
                feedback=feedback,
                matrices=[[(columns // 32, 32)]],
            ),
        )
        for config, feedback in pairs
        for columns in _COLUMNS
    ]


def _label(option: UnitPlan) -> str:
    segments = option.compressed or option.segments
    return " + ".join(dict.fromkeys(s.codec.name for s in segments))


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _describe(link: Link) -> str:
    return (
        f"{8e-9 * link.bandwidth:.3g} Gbit/s, {_milliseconds(link.latency)} per collective, "
        f"native reduce-scatter takes {link.reduce_scatter:.2g} and all-gather "
        f"{link.all_gather:.2g} times as long as messages"
    )


def _describe_speeds(speeds: Mapping[str, Speed]) -> str:
    said = [
        f"{key} {1e9 * s.encode:.3g} + {1e9 * s.decode:.3g}" for key, s in sorted(speeds.items())
    ]
    return f"measured ns per element, encode + decode: {', '.join(said)}"
