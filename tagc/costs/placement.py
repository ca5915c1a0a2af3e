"""On which link each dimension of a mesh lies, and whether compressing its activations pays.

Ranks are placed as torch numbers them: neighbours differ in the mesh's last dimension, and a host
has neighbouring ranks. So the last dimensions lie inside hosts, and the first cross the links
between them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tagc.basics.quantities import format_seconds
from tagc.costs.candidates import PAYS
from tagc.costs.dimensions import DATA, DimensionTraffic
from tagc.costs.link import Link
from tagc.costs.shapes import ModelError
from tagc.costs.traffic import Traffic
from tagc.plan import format_bytes


def place(mesh: Mapping[str, int], ranks_per_host: int) -> dict[str, int]:
    """How many ranks of each dimension's group share a host.

    Raises:
        ModelError: if hosts do not hold whole groups or equal parts of them.
    """
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
class DimensionAdvice:
    """What compressing one dimension's activations does to its time.

    Attributes:
        inside: whether all its groups lie inside hosts.
        dense_seconds: of its traffic in a step, on its link.
        seconds: compressed, on the link and in codecs.
        codec: seconds in codecs of it; 0 if not known.
    """

    traffic: DimensionTraffic
    inside: bool
    dense_seconds: float
    seconds: float
    codec: float

    @property
    def pays(self) -> bool:
        """Whether compression saves a noticeable share of the dimension's time."""
        return self.dense_seconds - self.seconds >= PAYS * self.dense_seconds > 0


def advise_dimensions(
    traffic: list[DimensionTraffic],
    mesh: Mapping[str, int],
    link: Link,
    *,
    memory_bandwidth: float | None,
) -> list[DimensionAdvice]:
    """Advice for each dimension that sends activations.

    Args:
        traffic: of a policy that compresses all of them.
        link: between hosts, and inside one.
        memory_bandwidth: bytes/s of the device's memory. Codecs read and write each element and
            each byte of a message once, when encoding and when decoding; None: they count as free.
    """
    together = place(mesh, link.ranks_per_host)
    found = []
    for t in traffic:
        inside = together[t.dimension] == t.ranks
        own = link_of(link, together[t.dimension])
        codec = 0.0
        if memory_bandwidth is not None:
            codec = 2 * (t.dense_bytes + t.wire_bytes) / memory_bandwidth
        found.append(
            DimensionAdvice(
                traffic=t,
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
    if inside:
        return link.seconds(Traffic(collectives=starts, inside=sent), t.ranks)
    return link.seconds(
        Traffic(collectives=starts, all_to_all=to_owners, ring=sent - to_owners), t.ranks
    )


def advice_table(advice: list[DimensionAdvice], link: Link) -> list[str]:
    """Text: a line for each dimension, and the policy to write."""
    rows = [("activations", "ranks", "link", "dense", "time", "sent", "time", "compress")]
    for each in advice:
        t = each.traffic
        where = "inside hosts" if each.inside else "between hosts"
        known = not each.inside or link.inside < math.inf
        times = [format_seconds(s) if known else "-" for s in (each.dense_seconds, each.seconds)]
        sizes = format_bytes(t.dense_bytes), format_bytes(t.wire_bytes)
        said = "yes" if each.pays else "no"
        rows.append(
            (t.dimension, str(t.ranks), where, sizes[0], times[0], sizes[1], times[1], said)
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(w) if i in (0, 2) else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return [*lines, "", *_verdict(advice)]


def _verdict(advice: list[DimensionAdvice]) -> list[str]:
    """Sentences: what to compress, how much time it saves, and how to write the policy."""
    names = [each.traffic.dimension for each in advice if each.pays]
    if not names:
        return ["Leave the activations to torch: compressing them does not pay."]
    dense = sum(each.dense_seconds for each in advice)
    best = sum(each.seconds if each.pays else each.dense_seconds for each in advice)
    saved = f"{format_seconds(best)} a step instead of {format_seconds(dense)}"
    if len(names) == len(advice):
        return [f"Compress all activations, as policy hybrid-3d does: {saved}."]
    rules = ", ".join(
        f"{name}: {{codec: {{kind: quantized, bits: 8, block: 64}}}}" for name in names
    )
    return [
        f"Compress {' and '.join(names)}: {saved} (what lies inside hosts without "
        "--inside-bandwidth is not counted).",
        f"Write {{schema: 1, extends: hybrid, dimensions: {{{rules}}}}}.",
    ]


def data_ranks(mesh: Mapping[str, int], ranks_per_host: int) -> int:
    """How many ranks that FSDP shards over share a host."""
    together = place(mesh, ranks_per_host)
    return math.prod(together[name] for name in mesh if name in DATA)
