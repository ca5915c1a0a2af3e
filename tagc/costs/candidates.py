"""Predicts the step of dense training and of every policy, for advice to compare."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tagc.costs.auto import FastestChoice, is_automatic
from tagc.costs.explain import Setting
from tagc.costs.link import GLOO_REDUCE_SCATTER, PAYS, Link, StepCost, Traffic, traffic
from tagc.costs.speed import (
    CodecTime,
    Coding,
    codec_seconds,
    memory_time,
    no_time,
    timed_when_asked,
)
from tagc.ops import get_ops
from tagc.plan import Direction, Segment, UnitInfo
from tagc.policy import Policy, PolicyError

OF_PARAMETERS = "not compared: rules for parameters do nothing with DDP, where no parameters travel"
STATE_BYTES = 16
"""Bytes per parameter of a rank: itself, its gradient and Adam's two moments, in float32."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""The dtypes by their names on the command line."""
# Range of the search for the break-even bandwidth, in bytes/s: 1 kbit/s to 100 Tbit/s.
_LOW, _HIGH = 125.0, 1.25e13


@dataclass(frozen=True, kw_only=True)
class Question(Setting):
    link: Link  # between hosts, or of a site
    shard_link: Link | None = None  # within one replica, if it differs
    compute: float | None = None  # seconds of a step without communication, if known
    overlap: float = 0.0  # share of the communication that compute can hide
    memory_bandwidth: float | None = None  # bytes/s of the device, to bound codec time
    device_memory: float | None = None  # bytes that activations leave a rank, if known

    @property
    def waste(self) -> float:
        """`reduce_scatter` of the link."""
        return GLOO_REDUCE_SCATTER if self.gloo else 1.0


@dataclass(frozen=True)
class Candidate:
    name: str
    traffic: Mapping[tuple[Direction, int], Traffic]  # of a step, by number of ranks
    codec: float  # seconds of a step
    memory: int  # bytes that a rank needs, without activations
    dense: bool = False
    waste: float = 1.0  # `reduce_scatter` of its link
    chosen: bool = False  # for this link only
    written: str = ""  # how to write the policy, if it has no name or file of its own
    rate: float | None = None  # its best learning rate, relative to an uncompressed run


class Advisor:
    """Plans and costs of dense training and of policies.

    Attributes:
        candidates: all forms of dense training, then the policies.
        refused: reasons why policies are not candidates, by name.
        about_codecs: text about the source of codec times.
        proviso: words that follow a bandwidth limit, about the codec time that it leaves out.
    """

    def __init__(self, question: Question, policies: Sequence[Policy]) -> None:
        self.question = q = question
        self.candidates: list[Candidate] = []
        self.refused: dict[str, str] = {}
        dense = Policy.load("dense")
        for name, form in _dense_forms(q).items():
            candidate = replace(_candidate(q, dense, no_time, dense=form), name=name)
            self.candidates.append(candidate)
            if q.gloo and not q.ddp:  # gloo's own all-reduce sends no more than it needs
                by_gloo = replace(candidate, name=f"{name} by gloo", waste=q.waste)
                self.candidates.append(by_gloo)
        policies = [policy for policy in policies if policy != dense]
        if q.ddp:
            self.refused |= {p.name: OF_PARAMETERS for p in policies if p.parameters}
            policies = [policy for policy in policies if not policy.parameters]
        # Only a link inside a host with a given bandwidth can be slow.
        slow = q.levels > 1 and q.link.inside < math.inf
        fewer = {p.name: p.with_inside("int8") for p in policies if slow and p.inside == "native"}
        self.about_codecs, self.proviso, time = _codec_time(q)
        for policy in policies:
            try:
                self.candidates.append(_candidate(q, policy, time))
            except PolicyError as error:
                self.refused[policy.name] = str(error)
        # The fastest of those that send fewer bits inside hosts, if it is clearly the fastest.
        inside = [
            replace(
                _candidate(q, policy, time),
                written=f"{{schema: 1, extends: {name}, inside: {policy.inside}}}",
            )
            for name, policy in fewer.items()
            if name not in self.refused
        ]
        rival = self.best(dense=False)
        best = min(filter(self.fits, inside), key=self._seconds, default=None)
        if best and rival and self._seconds(best) < (1 - PAYS) * self._seconds(rival):
            self.candidates.append(best)

    def cost(self, candidate: Candidate, bandwidth: float | None = None) -> StepCost:
        """The predicted step, on the question's link or with another bandwidth between hosts."""
        q = self.question
        parts = [
            (_link(q, direction, candidate.waste, bandwidth), sent, W)
            for (direction, W), sent in candidate.traffic.items()
        ]
        return StepCost(
            compute=q.compute or 0.0,
            codec=candidate.codec,
            link=sum(link.seconds(sent, W) for link, sent, W in parts),
            overlap=q.overlap,
            wire_bytes=sum(link.carried(sent, W) for link, sent, W in parts),
        )

    def fits(self, candidate: Candidate) -> bool:
        """Whether the candidate fits in the device's memory; True if that is unknown."""
        room = self.question.device_memory
        return room is None or candidate.memory <= room

    def best(self, *, dense: bool, fitting: bool = True) -> Candidate | None:
        """The dense or compressed candidate with the shortest step, among those that fit or all."""
        among = [c for c in self.candidates if c.dense == dense and (self.fits(c) or not fitting)]
        return min(among, key=self._seconds, default=None)

    def saving(self, candidate: Candidate, bandwidth: float | None = None) -> float:
        """Share of the best dense step that a candidate saves; negative if it takes longer."""
        dense = min(self._seconds(c, bandwidth) for c in self.candidates if c.dense)
        return 1 - self._seconds(candidate, bandwidth) / dense if dense else 0.0

    def last_to_pay(self) -> tuple[str, float] | None:
        """The policy that pays up to the highest bandwidth between hosts, and that bandwidth:
        infinity if it pays at the highest of the search. None if no policy pays at any."""
        among = [c for c in self.candidates if not (c.dense or c.chosen) and self.fits(c)]
        limit, name = max(((self._limit(c), c.name) for c in among), default=(0.0, ""))
        return (name, limit) if limit else None

    def _limit(self, candidate: Candidate) -> float:
        grid = [_LOW * 10 ** (i / 8) for i in range(1 + round(8 * math.log10(_HIGH / _LOW)))]
        paying = [i for i, b in enumerate(grid) if self.saving(candidate, b) >= PAYS]
        if not paying:
            return 0.0
        if paying[-1] == len(grid) - 1:
            return math.inf
        low, high = grid[paying[-1]], grid[paying[-1] + 1]
        for _ in range(20):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self.saving(candidate, middle) >= PAYS else (low, middle)
        return low

    def _seconds(self, candidate: Candidate, bandwidth: float | None = None) -> float:
        return self.cost(candidate, bandwidth).seconds


def _link(q: Question, direction: Direction, waste: float, bandwidth: float | None = None) -> Link:
    if q.shard_link is not None and direction != "replicas":
        return replace(q.shard_link, reduce_scatter=waste)
    return replace(q.link, reduce_scatter=waste, bandwidth=bandwidth or q.link.bandwidth)


def _candidate(
    q: Question,
    policy: Policy,
    time: CodecTime,
    *,
    dense: tuple[torch.dtype, torch.dtype] | None = None,
) -> Candidate:
    """A policy, or dense training with these dtypes of gradients and parameters."""
    dtype, parameter_dtype = dense or (q.dtype, q.parameter_dtype)
    chosen, choose = is_automatic(policy), None
    if chosen:
        choose = FastestChoice(
            lambda _, option: _link(q, option.direction, q.waste),
            time,
            micro_batches=q.micro_batches,
        )
    on_hosts = 1 if dense else q.ranks_per_host
    setting = replace(q, dtype=dtype, parameter_dtype=parameter_dtype, ranks_per_host=on_hosts)
    # The plan's warnings are ignored: the table shows if a policy sends more than dense.
    plan = setting.plan(policy, choose=choose)
    # FSDP itself sends some units, among all ranks at once.
    native = (replace(unit, info=unit.info.in_one_level()) for unit in plan.native)
    sent: dict[tuple[Direction, int], Traffic] = {}
    codec = 0.0
    for unit in (*plan.all_units, *native):
        key = (unit.direction, unit.info.world_size)
        sent[key] = sent.get(key, Traffic()) + traffic(unit, q.micro_batches)
        codec += codec_seconds(unit, time, q.micro_batches)
    memory = plan.memory.peak
    if q.ddp:  # the state of all parameters, and the gradients once more, in DDP's buckets
        trained = sum(param.numel for param in q.shapes.params if param.trainable)
        memory += STATE_BYTES * q.shapes.numel + q.dtype.itemsize * trained
    else:
        gathers = [unit.info for unit in plan.parameters or plan.native]
        memory += _training_bytes([unit.info for unit in plan.units], gathers)
    if not dense and q.micro_batches > 1:
        memory += plan.memory.waiting
    return Candidate(
        policy.name,
        sent,
        codec,
        memory,
        dense=dense is not None,
        waste=1.0 if dense else q.waste,
        chosen=chosen,
        rate=None if dense or policy.tuning is None else policy.tuning.rate_factor,
    )


def _training_bytes(reduces: Sequence[UnitInfo], gathers: Sequence[UnitInfo]) -> int:
    """Bytes that a rank needs, without activations: the sharded state; the unsharded parameters of
    the root and of two blocks (FSDP gathers one ahead); and the unsharded gradients of one unit,
    twice: as FSDP holds them, and in the buffer that it reduces."""
    columns = [sum(p.columns for p in info.params) for info in gathers]
    sizes = [
        (g, g.world_size * n * g.dtype.itemsize) for g, n in zip(gathers, columns, strict=True)
    ]
    root = sum(size for g, size in sizes if not g.name)
    blocks = sorted(size for g, size in sizes if g.name)
    gradients = [
        r.world_size * sum(p.columns for p in r.params) * (r.dtype.itemsize + g.dtype.itemsize)
        for r, g in zip(reduces, gathers, strict=True)
    ]
    return STATE_BYTES * sum(columns) + root + sum(blocks[-2:]) + max(gradients, default=0)


def _codec_time(q: Question) -> tuple[str, str, CodecTime]:
    """About the codec time, a proviso for limits, and the time."""
    if q.memory_bandwidth is not None:
        return (
            "codec time: a lower bound, as if codecs read and wrote every byte once at the given "
            "memory bandwidth; not measured",
            ", or lower, because codecs take longer",
            memory_time(q.memory_bandwidth),
        )
    if not q.gloo:
        return (
            "codec time: not included; --memory-bandwidth gives a lower bound",
            ", or lower, because codec time is not included",
            no_time,
        )
    ops, device = get_ops("cpu"), torch.device("cpu")
    name = getattr(ops, "__name__", "")
    about = f"codec time: measured here, in one process with one thread (ops {name})"
    timed = timed_when_asked({}, ops, device)

    def with_one_thread(coding: Coding, segment: Segment) -> float:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return timed(coding, segment)
        finally:
            torch.set_num_threads(threads)

    return about, "", with_one_thread


def _dense_forms(q: Question) -> dict[str, tuple[torch.dtype, torch.dtype]]:
    """Dense training by name: dtypes of gradients and parameters, including the question's."""
    forms = {
        "dense fp32": (torch.float32, torch.float32),
        "dense bf16": (torch.bfloat16, torch.bfloat16),
    }
    if (q.dtype, q.parameter_dtype) not in forms.values():
        name = f"dense {dtype_name(q.dtype)}, {dtype_name(q.parameter_dtype)} parameters"
        forms[name] = (q.dtype, q.parameter_dtype)
    return forms


def dtype_name(dtype: torch.dtype) -> str:
    return next(name for name, known in DTYPES.items() if known == dtype)
