"""Predicts the step of dense training and of every policy, for advice to compare."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tagc.costs.auto import FastestChoice, codecs_of, is_automatic
from tagc.costs.codec_time import CodecTime, Speed, measured_time, memory_time, no_time, speed_key
from tagc.costs.explain import plan_shapes
from tagc.costs.link import GLOO_REDUCE_SCATTER, Link
from tagc.costs.model import StepCost, Workload, step_cost, workload
from tagc.costs.shapes import ModelShapes, ranks_in_levels
from tagc.costs.speed import measure_speeds
from tagc.costs.training_memory import replicated_bytes, training_bytes
from tagc.ops import Ops, get_ops
from tagc.plan import Direction, Plan
from tagc.policy import Policy, PolicyError

PAYS = 0.05
"""Compression pays if it saves this share of the best dense form's step."""
OF_PARAMETERS = "not compared: rules for parameters do nothing with DDP, where no parameters travel"
# Range of the search for the break-even bandwidth, in bytes/s: 1 kbit/s to 100 Tbit/s.
_LOW, _HIGH = 125.0, 1.25e13


@dataclass(frozen=True, kw_only=True)
class Question:
    """A training setup to advise on.

    Attributes:
        world_size: total number of ranks.
        replicas: number of copies of the sharded model.
        ddp: whether each rank has the whole model, and DDP all-reduces gradients.
        link: the link between hosts.
        shard_link: the link within one replica, if it differs.
        compute: seconds of a step without communication; None if unknown.
        overlap: share of the communication that compute can hide.
        dtype: dtype of the gradients that FSDP or DDP reduces, before compression.
        parameter_dtype: dtype of the parameters that FSDP gathers; with DDP the same as ``dtype``.
        gloo: whether the backend is gloo, on CPUs.
        memory_bandwidth: bytes/s of the device's memory, for a lower bound of codec time.
        ops: the implementation to measure on CPUs.
        device_memory: bytes of a rank's memory that activations leave free; None if unknown.
        micro_batches: backwards per optimizer step; ``compute`` covers all of them.
    """

    shapes: ModelShapes
    world_size: int
    replicas: int
    link: Link
    shard_link: Link | None
    compute: float | None
    overlap: float
    dtype: torch.dtype
    parameter_dtype: torch.dtype
    gloo: bool
    memory_bandwidth: float | None
    ops: str | None = None
    device_memory: float | None = None
    micro_batches: int = 1
    ddp: bool = False

    @property
    def levels(self) -> int:
        """How many ranks of a host add up their gradients first; 1 if a replica does not span
        several whole hosts."""
        return ranks_in_levels(self.world_size // self.replicas, self.link.ranks_per_host)


@dataclass(frozen=True)
class Candidate:
    """A way to train.

    Attributes:
        memory: bytes that a rank needs, without activations.
        waste: ``reduce_scatter`` of the link, see :class:`tagc.costs.link.Link`.
        chosen: whether its plan is for this link only.
        written: how to write the policy, if it has no name or file of its own.
        rate: the policy's best learning rate, relative to an uncompressed run; None if unknown.
    """

    name: str
    work: Workload
    memory: int
    dense: bool = False
    waste: float = 1.0
    chosen: bool = False
    written: str = ""
    rate: float | None = None


class Advisor:
    """Plans and costs of dense training and of policies.

    Attributes:
        candidates: all forms of dense training, then the policies.
        refused: reasons why policies are not candidates, by name.
        about_codecs: text about the source of codec times.
    """

    def __init__(self, question: Question, policies: Sequence[Policy]) -> None:
        self.question = question
        self.candidates: list[Candidate] = []
        self.refused: dict[str, str] = {}
        q = question
        self._waste = GLOO_REDUCE_SCATTER if q.gloo else 1.0
        dense = self._dense = Policy.load("dense")
        for name, (dtype, parameter_dtype) in _dense_forms(q).items():
            work, memory = self._work(dense, no_time, dtype, parameter_dtype)
            self.candidates.append(Candidate(name, work, memory, dense=True))
            if q.gloo and not q.ddp:  # gloo's own all-reduce sends no more than it needs
                self.candidates.append(
                    Candidate(f"{name} by gloo", work, memory, dense=True, waste=self._waste)
                )
        policies = [policy for policy in policies if policy != dense]
        if q.ddp:
            self.refused |= {p.name: OF_PARAMETERS for p in policies if p.parameters}
            policies = [policy for policy in policies if not policy.parameters]
        # Only a link inside a host with a given bandwidth can be slow.
        slow = q.levels > 1 and q.link.inside < math.inf
        fewer = {p.name: p.with_inside("int8") for p in policies if slow and p.inside == "native"}
        self.about_codecs, self._time = self._codec_time([*policies, *fewer.values()])
        for policy in policies:
            try:
                self.candidates.append(self._candidate(policy))
            except PolicyError as error:
                self.refused[policy.name] = str(error)
        self._add_inside({name: p for name, p in fewer.items() if name not in self.refused})

    def _candidate(self, policy: Policy) -> Candidate:
        q = self.question
        work, memory = self._work(policy, self._time, q.dtype, q.parameter_dtype)
        chosen = is_automatic(policy)
        rate = None if policy.tuning is None else policy.tuning.rate_factor
        return Candidate(policy.name, work, memory, waste=self._waste, chosen=chosen, rate=rate)

    def _add_inside(self, policies: Mapping[str, Policy]) -> None:
        """Add the fastest of ``policies`` that fit, if it is clearly faster than all candidates.

        Args:
            policies: policies that send fewer bits inside hosts, by the name of the original.
        """
        found = [
            replace(
                self._candidate(policy),
                written=f"{{schema: 1, extends: {name}, inside: {policy.inside}}}",
            )
            for name, policy in policies.items()
        ]
        found = [c for c in found if self.fits(c)]
        best = min(found, key=lambda c: self.cost(c).seconds, default=None)
        rival = self.best(dense=False)
        if best and rival and self.cost(best).seconds < (1 - PAYS) * self.cost(rival).seconds:
            self.candidates.append(best)

    @property
    def proviso(self) -> str:
        """Words that follow a bandwidth limit, about the codec time that it does not include."""
        if self._time is no_time:
            return ", or lower, because codec time is not included"
        return ", or lower, because codecs take longer" if self.question.memory_bandwidth else ""

    def cost(self, candidate: Candidate, bandwidth: float | None = None) -> StepCost:
        """The predicted step, on the question's link or with another bandwidth between hosts."""
        q = self.question
        directions: tuple[Direction, ...] = ("gradients", "parameters", "replicas")
        return step_cost(
            candidate.work,
            {d: self._link(d, candidate.waste, bandwidth) for d in directions},
            compute=q.compute or 0.0,
            overlap=q.overlap,
        )

    def fits(self, candidate: Candidate) -> bool:
        """Whether the candidate fits in the device's memory; True if that is unknown."""
        room = self.question.device_memory
        return room is None or candidate.memory <= room

    def best(self, *, dense: bool, fitting: bool = True) -> Candidate | None:
        """The dense or compressed candidate with the shortest step, among those that fit or all."""
        among = [c for c in self.candidates if c.dense == dense]
        among = [c for c in among if self.fits(c) or not fitting]
        return min(among, key=lambda c: self.cost(c).seconds, default=None)

    def saving(self, candidate: Candidate, bandwidth: float | None = None) -> float:
        """Share of the best dense step that a candidate saves; negative if it takes longer."""
        dense = min(self.cost(c, bandwidth).seconds for c in self.candidates if c.dense)
        return 1 - self.cost(candidate, bandwidth).seconds / dense if dense else 0.0

    def last_to_pay(self) -> tuple[str, float] | None:
        """The policy that pays up to the highest bandwidth between hosts, and that bandwidth.

        Returns:
            The name, and bytes/s: infinity if the policy pays at the highest bandwidth of the
            search. None if no policy pays at any bandwidth.
        """
        among = [c for c in self.candidates if not (c.dense or c.chosen) and self.fits(c)]
        limits = [(self._limit(c), c.name) for c in among]
        limit, name = max(limits, default=(0.0, ""))
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

    def _link(self, direction: Direction, waste: float, bandwidth: float | None = None) -> Link:
        q = self.question
        if q.shard_link is not None and direction != "replicas":
            return replace(q.shard_link, reduce_scatter=waste)
        link = replace(q.link, reduce_scatter=waste)
        return link if bandwidth is None else replace(link, bandwidth=bandwidth)

    def _work(
        self, policy: Policy, time: CodecTime, dtype: torch.dtype, parameter_dtype: torch.dtype
    ) -> tuple[Workload, int]:
        """The policy's workload, and the bytes of memory that a rank needs."""
        q = self.question
        ranks = q.world_size // q.replicas
        if q.ddp:
            reduces, gathers = q.shapes.replicated_units(ranks, q.dtype), []
            memory = replicated_bytes(q.shapes.numel, reduces)
        else:
            reduces, gathers = q.shapes.units(ranks, dtype, parameter_dtype)
            memory = training_bytes(reduces, gathers)
        plan = self._plan(policy, dtype, parameter_dtype)
        work = workload(plan, time, gathers=gathers, micro_batches=q.micro_batches)
        waiting = plan.memory.waiting if policy != self._dense and q.micro_batches > 1 else 0
        return work, memory + plan.memory.peak + waiting

    def _plan(self, policy: Policy, dtype: torch.dtype, parameter_dtype: torch.dtype) -> Plan:
        q = self.question
        choose = None
        if is_automatic(policy):
            choose = FastestChoice(
                lambda _, direction: self._link(direction, self._waste),
                self._time,
                micro_batches=q.micro_batches,
            )
        # The plan's warnings are ignored: the table shows if a policy sends more than dense.
        return plan_shapes(
            q.shapes,
            policy,
            world_size=q.world_size,
            replicas=q.replicas,
            ddp=q.ddp,
            ranks_per_host=1 if policy == self._dense else q.levels,
            dtype=dtype,
            parameter_dtype=parameter_dtype,
            choose=choose,
            gloo=q.gloo,
        )

    def _codec_time(self, policies: Sequence[Policy]) -> tuple[str, CodecTime]:
        q = self.question
        if q.memory_bandwidth is not None:
            return (
                "codec time: a lower bound, as if codecs read and wrote every byte once at the "
                "given memory bandwidth; not measured",
                memory_time(q.memory_bandwidth),
            )
        if not q.gloo:
            return (
                "codec time: not included; --memory-bandwidth gives a lower bound",
                no_time,
            )
        ops = get_ops("cpu", q.ops)
        ops_name = f"ops {getattr(ops, '__name__', q.ops)}"
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            speeds = self._speeds(policies, ops)
        finally:
            torch.set_num_threads(threads)
        about = f"codec time: measured here, in one process with one thread ({ops_name})"
        return about, measured_time(speeds)

    def _speeds(self, policies: Sequence[Policy], ops: Ops) -> dict[str, Speed]:
        q, device = self.question, torch.device("cpu")
        speeds: dict[str, Speed] = {}
        for dtype, parameters in ((q.dtype, False), (q.parameter_dtype, True)):
            ranks = q.world_size // q.replicas
            for world_size in {ranks, ranks // q.levels, q.replicas}:
                for policy in policies:
                    codecs = codecs_of(policy, dtype, world_size, parameters=parameters)
                    new = [c for c in codecs if speed_key(c) not in speeds]
                    speeds |= measure_speeds(new, ops, device, dtype)
        return speeds


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
    """The dtype's name on the command line."""
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
