"""``codec: auto``: chooses the fastest codecs for the link that ``tagc.wrap`` measures.

A rank's choice decides what it sends, so all ranks must choose from bit-identical numbers. Each
rank measures, then all take the slowest of every number. (A step waits for the slowest rank, too.)
A maximum does not depend on order, so ranks without a common group agree through ranks that share a
group with both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
import torch.distributed as dist

from tagc.collect import HostGroups, Transport, agree_on, gather_merged
from tagc.costs.link import Link, unit_seconds
from tagc.costs.speed import (
    CodecTime,
    Speed,
    fastest,
    measured_time,
    timed_when_asked,
)
from tagc.ops import get_ops
from tagc.plan import Choice, Choose, UnitPlan
from tagc.policy import Policy
from tagc.policy.rules import AutoConfig

# An option must take at most this share of a less compressed one's predicted seconds. Codecs are
# timed in a loop with warm caches, and links without other work; both are slower in a step.
WORTH = 0.7
# Seconds that a large exchange should take. Its size adapts: links differ by a factor of 1000.
_TARGET = 0.04
_FIRST_BYTES, _MAX_BYTES = 1 << 16, 1 << 26
_REPEATS, _SMALL_REPEATS = 5, 10


def is_automatic(policy: Policy) -> bool:
    rules = (*policy.gradients, *policy.parameters, *policy.replicas)
    return any(isinstance(rule.codec, AutoConfig) for rule in rules)


@dataclass(frozen=True)
class FastestChoice:
    """Chooses the option that is clearly the fastest by prediction, given the link of an option for
    the unit at a position. See :class:`tagc.plan.build.Choose`."""

    link: Callable[[int, UnitPlan], Link]
    time: CodecTime
    notes: tuple[str, ...] = ()
    micro_batches: int = 1

    def __call__(self, position: int, options: Sequence[UnitPlan]) -> Choice:
        seconds = [
            unit_seconds(option, self.link(position, option), self.time, self.micro_batches)
            for option in options
        ]
        index = 0
        for i, s in enumerate(seconds):
            if s <= WORTH * seconds[index]:
                index = i
        labels = [
            " + ".join(dict.fromkeys(s.codec.name for s in option.compressed or option.segments))
            for option in options
        ]
        among = [f"{label} {_milliseconds(s)}" for label, s in zip(labels, seconds, strict=True)]
        return Choice(index=index, why=f"{labels[index]}, out of {', '.join(among)}")


def measured_choice(
    links: Sequence[tuple[dist.ProcessGroup, torch.device]],
    ops: str | None,
    plan: Callable[[Choose], object],
    *,
    replicas: dist.ProcessGroup | None,
    hosts: Sequence[HostGroups | None],
) -> FastestChoice:
    """Measure links and codecs, together with all other ranks, in about a second.

    Args:
        links: group and device of every unit, in the plan's order.
        plan: makes the plan by a choice. The codecs of all its options are measured.
        replicas: the group of the all-reduce across replicas.
        hosts: the host groups of every unit; None for a unit whose ranks do not add up inside hosts
            first.

    Raises:
        RuntimeError: if planning or timing failed on another rank.
    """
    device = links[0][1]
    everywhere = [group for group, _ in links] + ([] if replicas is None else [replicas])
    about = dict.fromkeys(everywhere, "")
    groups = list(about)
    # Groups of all hosts measure at the same time, because they share the hosts' links in a step.
    for levels in hosts:
        if levels is not None:
            about |= {levels.across: ", one per host", levels.inside: " of a host"}

    def time_codecs() -> tuple[dict[str, Speed], str]:
        found: dict[str, Speed] = {}
        time = timed_when_asked(found, get_ops(device, ops), device)
        plan(FastestChoice(lambda *_: Link(bandwidth=math.inf), time))  # asks for all options
        return found, ""

    # An error on one rank is raised on all. Speeds may differ between ranks.
    speeds = agree_on(groups, {"speed of codecs": time_codecs})["speed of codecs"]
    measured = {i: measure_link(group, device) for i, group in enumerate(about)}
    slowest = gather_merged(groups, measured, _slower)
    by_group = {group: slowest[i] for i, group in enumerate(about)}
    speeds = gather_merged(groups, speeds, _slower)

    def link_of(position: int, option: UnitPlan) -> Link:
        if option.direction == "replicas" and replicas is not None:
            return by_group[replicas]
        levels = hosts[position]
        if levels is None or option.info.ranks_per_host == 1:
            return by_group[links[position][0]]
        across, inside = by_group[levels.across], by_group[levels.inside]
        # A step waits for both, one after the other.
        latency = (across.latency + inside.latency) / 2
        return replace(across, latency=latency, inside=inside.bandwidth)

    notes = [
        f"measured over {group.size()} ranks{about[group]}: {8e-9 * link.bandwidth:.3g} Gbit/s, "
        f"{_milliseconds(link.latency)} per collective, native reduce-scatter takes "
        f"{link.reduce_scatter:.2g} and all-gather {link.all_gather:.2g} times as long as messages"
        for group, link in by_group.items()
        if group.size() > 1
    ]
    each = [f"{key} {1e9 * s.encode:.3g} + {1e9 * s.decode:.3g}" for key, s in speeds.items()]
    if each:  # one rank codes nothing
        notes.append(f"measured ns per element, encode + decode: {', '.join(each)}")
    return FastestChoice(link_of, measured_time(speeds), tuple(notes))


def measure_link(group: dist.ProcessGroup, device: torch.device) -> Link:
    """Measure an all-to-all, and the backend's own collectives relative to it. All ranks of a group
    call it together; each gets its own numbers."""
    transport = Transport(group)
    W = transport.size
    if W == 1:
        return Link(bandwidth=1e12)

    def collectives(numel: int) -> list[Callable[[], object]]:
        """An all-to-all, a reduce-scatter and an all-gather that send the same number of bytes."""
        words = torch.zeros(W, numel, dtype=torch.int32, device=device)
        received = torch.empty_like(words)
        whole = torch.zeros(W * numel, dtype=torch.float32, device=device)
        shard = torch.zeros(numel, dtype=torch.float32, device=device)
        return [
            lambda: transport.all_to_all(received, words).wait(),
            lambda: transport.reduce_scatter(shard, whole, dist.ReduceOp.SUM).wait(),
            lambda: transport.all_gather(whole, shard),
        ]

    latency = fastest(collectives(1)[0], device, _SMALL_REPEATS)
    numel = _FIRST_BYTES // (4 * W) or 1
    # The size must be the same on all ranks.
    first = fastest(collectives(numel)[0], device, 3)
    first = gather_merged([group], {"first": first}, max)["first"]
    growth = max(1.0, _TARGET / max(first, 1e-9))
    numel = int(min(numel * growth, _MAX_BYTES // (4 * W)))
    sent = 4 * numel * (W - 1)
    took = [fastest(run, device, _REPEATS) for run in collectives(numel)]
    # The bytes take at least half of it: latency is noisy.
    large, reducing, gathering = (max(seconds - latency, seconds / 2) for seconds in took)
    return Link(
        bandwidth=sent / large,
        latency=latency,
        reduce_scatter=reducing / large,
        all_gather=gathering / large,
    )


T = TypeVar("T", Link, Speed)


def _slower(a: T, b: T) -> T:
    """The larger of each number, and the smaller bandwidth."""
    slower = {f.name: max(getattr(a, f.name), getattr(b, f.name)) for f in fields(a)}
    if isinstance(a, Link) and isinstance(b, Link):
        slower["bandwidth"] = min(a.bandwidth, b.bandwidth)
    return replace(a, **slower)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
