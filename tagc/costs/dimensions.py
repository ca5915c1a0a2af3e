"""What a step sends for activations over the dimensions of a mesh, from shapes alone, on which link
each dimension lies, and whether compressing it pays.

Counts for one rank, the busiest of its dimension, in a step with ``tokens`` tokens of its
data-parallel rank, all micro-batches together:

==  ===================================================================================
tp  in every block two all-reduces in forward and two in backward, of all tokens; with
    sequence parallelism a reduce-scatter and an all-gather each, which send as much
cp  in every block the keys and values of all tokens, in forward and again in backward,
    and their gradients
pp  the tokens to the next stage, and their gradients to the one before
ep  in every block with experts the tokens to their experts and back, and their
    gradients, if they spread evenly
==  ===================================================================================

Recomputed activations (checkpointing) send tp, cp and ep once more, which is not counted.

Ranks are placed as torch numbers them: neighbours differ in the mesh's last dimension, and a host
has neighbouring ranks. So the last dimensions lie inside hosts, and the first cross the links
between them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tagc.basics.quantities import format_seconds
from tagc.costs.link import PAYS, Link, Traffic
from tagc.costs.shapes import ModelError, ModelShapes, ParamShape
from tagc.ops.exponents import BITS as EXPONENT_BITS
from tagc.plan import aligned, format_bytes
from tagc.policy import Policy
from tagc.policy.roles import role_of
from tagc.policy.rules import DimensionRule, ExactActivationsConfig
from tagc.policy.show import flow

ACTIVATIONS = ("tp", "cp", "pp", "ep")
"""The dimensions that send activations."""
DATA = ("dp", "dp_shard")
"""The dimensions over which FSDP shards."""


@dataclass(frozen=True, kw_only=True)
class DimensionTraffic:
    """What a rank sends in one dimension in a step."""

    dimension: str
    ranks: int
    elements: int
    bits: float | None  # of an element, scales included; None if it travels as it is
    dense_bytes: int
    wire_bytes: int
    collectives: int


def parse_mesh(text: str) -> dict[str, int]:
    """``pp=2,dp=4,tp=8`` as ranks by dimension. Raises ModelError for anything else."""
    mesh: dict[str, int] = {}
    for part in text.split(","):
        name, equals, ranks = part.strip().partition("=")
        if not equals or not ranks.isdecimal() or not 1 <= int(ranks) <= 2**20 or name in mesh:
            raise ModelError(f"{text!r} is no mesh: write pp=2,dp=4,tp=8")
        if name not in (*ACTIVATIONS, *DATA):
            raise ModelError(f"{name!r} in {text!r} is none of {', '.join((*DATA, *ACTIVATIONS))}")
        mesh[name] = int(ranks)
    return mesh


def one_stage(shapes: ModelShapes, mesh: Mapping[str, int]) -> ModelShapes:
    """The parameters that FSDP shards on a rank: those of its pipeline stage, with the part that
    tensor and expert parallelism leave it. (The first stage, with the embedding and the head.)"""
    stages, tensor, expert = (mesh.get(name, 1) for name in ("pp", "tp", "ep"))
    kept = shapes.blocks[: math.ceil(len(shapes.blocks) / stages)]
    dropped = tuple(f"{name}." for name in shapes.blocks[len(kept) :])
    params = []
    for param in shapes.params:
        if param.name.startswith(dropped):
            continue
        parts = expert if _is_expert(param) else tensor if len(param.shape) > 1 else 1
        first, *rest = param.shape or (1,)
        params.append(replace(param, shape=(math.ceil(first / parts), *rest)))
    return replace(shapes, params=tuple(params), blocks=kept)


def activation_traffic(
    shapes: ModelShapes,
    policy: Policy,
    mesh: Mapping[str, int],
    *,
    tokens: int,
    itemsize: int,
    experts_per_token: int = 1,
    micro_batches: int = 1,
    gloo: bool = True,
) -> list[DimensionTraffic]:
    """The traffic of each dimension that sends activations, in the mesh's order, for ``tokens`` of
    a data-parallel rank in all micro-batches together. ``itemsize``: bytes of an uncompressed
    activation; ``gloo``: whether the backend is gloo, which can send exact messages between two
    ranks. Raises ModelError if the shapes lack what a dimension needs: blocks, experts."""
    width, blocks = _width(shapes), len(shapes.blocks)
    mine = math.ceil(blocks / mesh.get("pp", 1))
    found = []
    for name, ranks in mesh.items():
        if name not in ACTIVATIONS or ranks == 1:
            continue
        if not blocks:
            raise ModelError(f"the model has no blocks, over which {name} would be counted")
        others = (ranks - 1) / ranks
        if name == "tp":
            starts = 4 * mine
            elements = starts * 2 * others * tokens * width
        elif name == "cp":
            starts = 3 * mine
            elements = starts * others * tokens * _keys_and_values(shapes, width)
        elif name == "pp":
            starts = 2 if ranks > 2 else 1
            elements = starts * tokens * width
        else:
            starts = math.ceil(4 * mine * _blocks_with_experts(shapes) / blocks)
            elements = starts * others * tokens * experts_per_token * width
        bits = _bits(policy.dimensions.get(name), itemsize, left=name == "pp" and not gloo)
        dense = round(elements * itemsize)
        found.append(
            DimensionTraffic(
                dimension=name,
                ranks=ranks,
                elements=round(elements),
                bits=bits,
                dense_bytes=dense,
                wire_bytes=dense if bits is None else round(elements * bits / 8),
                collectives=starts * micro_batches,
            )
        )
    return found


def _bits(rule: DimensionRule | None, itemsize: int, *, left: bool) -> float | None:
    """Bits of an element of ``itemsize`` bytes; None if it travels as it is. ``left``: whether
    messages of no fixed size are left to torch."""
    if rule is None:
        return None
    codec = rule.codec
    if isinstance(codec, ExactActivationsConfig):
        return EXPONENT_BITS if itemsize == 2 and not left else None  # of bfloat16
    return codec.bits + 16 / codec.block


def _width(shapes: ModelShapes) -> int:
    """The most frequent size of vectors, which are the norms', or of matrices' rows."""
    vectors = Counter(p.shape[0] for p in shapes.params if len(p.shape) == 1)
    rows = Counter(p.shape[-1] for p in shapes.params if len(p.shape) > 1)
    for sizes in (vectors, rows):
        if sizes:
            return sizes.most_common(1)[0][0]
    raise ModelError("the model has no matrices, from which its width would follow")


def _keys_and_values(shapes: ModelShapes, width: int) -> int:
    first = tuple(f"{name}." for name in shapes.blocks[:1])
    names = ("k_proj.weight", "v_proj.weight", "wk.weight", "wv.weight")
    found = [p for p in shapes.params if p.name.startswith(first) and p.name.endswith(names)]
    return sum(p.shape[0] for p in found) if len(found) == 2 else 2 * width


def _is_expert(param: ParamShape) -> bool:
    return "experts." in param.name and "shared_experts." not in param.name


def _blocks_with_experts(shapes: ModelShapes) -> int:
    names = {p.name for p in shapes.params if _is_expert(p) and role_of(p.name) == "mlp"}
    found = sum(any(name.startswith(f"{block}.") for name in names) for block in shapes.blocks)
    if not found:
        raise ModelError("the model has no experts, which ep=... would spread over ranks")
    return found


def traffic_table(traffic: list[DimensionTraffic], tokens: int) -> str:
    lines = [f"activations, for {tokens:,} tokens a step:"]
    rows = [("dimension", "ranks", "bits", "dense", "sent", "ratio")]
    for t in traffic:
        ratio = t.dense_bytes / t.wire_bytes if t.wire_bytes else 1.0
        bits = "-" if t.bits is None else f"{t.bits:g}"
        sizes = format_bytes(t.dense_bytes), format_bytes(t.wire_bytes)
        rows.append((t.dimension, str(t.ranks), bits, *sizes, f"{ratio:.2f}"))
    return "\n".join([*lines, *aligned(rows)])


def place(mesh: Mapping[str, int], ranks_per_host: int) -> dict[str, int]:
    """How many ranks of each dimension's group share a host. Raises ModelError if hosts do not hold
    whole groups or equal parts of them."""
    world = math.prod(mesh.values())
    if world % ranks_per_host:
        raise ModelError(
            f"the mesh has {world} ranks, which do not divide by --ranks-per-host {ranks_per_host}"
        )
    found, room = {}, ranks_per_host
    for name, ranks in reversed([*mesh.items()]):
        together = math.gcd(ranks, room)
        if together < min(ranks, room):
            raise ModelError(
                f"{name}={ranks} does not fill hosts: {room} ranks of it would have to share one"
            )
        found[name] = together
        room //= together
    return {name: found[name] for name in mesh}


def link_of(link: Link, together: int) -> Link:
    """The link of one dimension: ``together`` ranks of a group share a host, and so all groups of
    the host share its card."""
    groups = max(1, link.ranks_per_host // together)
    return replace(link, ranks_per_host=together, groups=groups)


@dataclass(frozen=True, kw_only=True)
class DimensionAdvice(DimensionTraffic):
    """What compressing one dimension's activations does to its seconds in a step."""

    inside: bool  # whether all its groups lie inside hosts
    dense_seconds: float
    seconds: float  # compressed, on the link and in codecs
    codec: float  # in codecs of it; 0 if not known

    @property
    def pays(self) -> bool:
        saved = self.dense_seconds - self.seconds
        return self.bits is not None and saved >= PAYS * self.dense_seconds > 0


def advise_dimensions(
    traffic: list[DimensionTraffic],
    mesh: Mapping[str, int],
    link: Link,
    *,
    memory_bandwidth: float | None,
) -> list[DimensionAdvice]:
    """Advice for each dimension that sends activations, from the ``traffic`` of a policy that
    compresses all of them. Without a ``memory_bandwidth``, in bytes/s, codecs count as free."""
    together = place(mesh, link.ranks_per_host)
    found = []
    for t in traffic:
        inside = together[t.dimension] == t.ranks
        own = link_of(link, together[t.dimension])
        # Encoding and decoding read or write each element and each byte of a message once.
        codec = 2 * (t.dense_bytes + t.wire_bytes) / (memory_bandwidth or math.inf)
        found.append(
            DimensionAdvice(
                **vars(t),
                inside=inside,
                dense_seconds=_seconds(t, own, inside=inside, coded=False),
                seconds=_seconds(t, own, inside=inside, coded=True) + codec,
                codec=codec,
            )
        )
    return found


def _seconds(t: DimensionTraffic, link: Link, *, inside: bool, coded: bool) -> float:
    sent = t.wire_bytes if coded else t.dense_bytes
    # A coded all-reduce or reduce-scatter goes as messages to owners, and its sum comes back.
    to_owners = sent / 2 if t.dimension == "tp" and coded else sent if t.dimension == "ep" else 0
    starts = t.collectives * (2 if t.dimension == "tp" and coded else 1)
    ways = {"inside": sent} if inside else {"all_to_all": to_owners, "ring": sent - to_owners}
    return link.seconds(Traffic(collectives=starts, **ways), t.ranks)


def advice_table(advice: list[DimensionAdvice], link: Link, policy: Policy) -> list[str]:
    rows = [("activations", "ranks", "link", "dense", "time", "sent", "time", "compress")]
    for t in advice:
        where = "inside hosts" if t.inside else "between hosts"
        known = not t.inside or link.inside < math.inf
        dense, coded = (format_seconds(s) if known else "-" for s in (t.dense_seconds, t.seconds))
        before, after = format_bytes(t.dense_bytes), format_bytes(t.wire_bytes)
        pays = "yes" if t.pays else "no"
        rows.append((t.dimension, str(t.ranks), where, before, dense, after, coded, pays))
    return [*aligned(rows, left=(0, 2)), "", *_verdict(advice, policy)]


def _verdict(advice: list[DimensionAdvice], policy: Policy) -> list[str]:
    """Sentences: what to compress, how much time it saves, and how to write the policy."""
    names = [each.dimension for each in advice if each.pays]
    if not names:
        return ["Leave the activations to torch: compressing them does not pay."]
    dense = sum(each.dense_seconds for each in advice)
    best = sum(each.seconds if each.pays else each.dense_seconds for each in advice)
    saved = f"{format_seconds(best)} a step instead of {format_seconds(dense)}"
    if len(names) == len(advice):
        return [f"Compress all activations, as policy {policy.name} does: {saved}."]
    kept = policy.model_dump(mode="json", include={"dimensions": {*names}}, exclude_unset=True)
    write = f"In a copy of {policy.name}, keep these dimensions only: {flow(kept['dimensions'])}."
    if policy.name == "hybrid-3d":
        write = f"Write {flow({'schema': 1, 'extends': 'hybrid', **kept})}."
    return [
        f"Compress {' and '.join(names)}: {saved} (what lies inside hosts without "
        "--inside-bandwidth is not counted).",
        write,
    ]


def data_ranks(mesh: Mapping[str, int], ranks_per_host: int) -> int:
    together = place(mesh, ranks_per_host)
    return math.prod(together[name] for name in mesh if name in DATA)
