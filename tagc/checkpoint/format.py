"""The format of a saved state: named tensors of one rank, and a header that describes them.

Everything is a tensor, including the header, so neither saving nor loading needs pickle. A digest
detects damage. It hashes sums over the bits of tensors, which are taken where a tensor lies, so a
GPU's residuals are not hashed by the host.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Annotated, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel, Field, StringConstraints, TypeAdapter, ValidationError
from torch import Tensor
from torch.nn import functional

from tagc.basics.version import __version__

FORMAT = 1
# torch's distributed checkpoints need the shape of a tensor before they read it.
_ABOUT_BYTES = 2048
_LONGEST_NAME = 200
# The first name that torch looks for. If the checkpoint has no such state, torch's message names it
# ("Missing key in checkpoint state_dict: ..."), so this is the only place for the remedy.
_ABOUT = (
    "about. If this is missing from a checkpoint of dense training, leave the compressor's key out "
    "of what is loaded (nothing is owed yet); from one of other ranks or another policy, load it "
    "with tagc.compressor(model).load(folder)"
)
BY_HANDLE = "call load(folder) on the same handle, with the checkpoint's folder"
DENSE = (
    "If it is from training without tagc, there is nothing to load: leave this out, and training "
    "continues with zero residuals"
)
"""What to do with a checkpoint that has no state."""


class StateError(ValueError):
    """A state that cannot be loaded, or only with loss."""


_Hash = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
_Number = Annotated[int, Field(ge=0, lt=10**18)]


class StateHeader(BaseModel, frozen=True):
    policy: str  # its name, for messages
    policy_hash: _Hash  # see :attr:`tagc.Policy.hash`
    layout: _Hash  # fingerprint of the plan
    world_size: _Number
    rank: _Number
    step: _Number  # reductions so far: the largest number of any unit
    version: str = __version__
    parts: str = ""  # hash of the parts of parameters that tensor parallelism gave the rank, if any

    def to_strings(self) -> dict[str, str]:
        strings = {name: str(value) for name, value in self}
        strings["policy"] = self.policy[:_LONGEST_NAME].encode("utf-8", "replace").decode()
        return {"format": str(FORMAT), **strings}

    @property
    def moment(self) -> str:
        """Text that is equal on all ranks of one save, whatever part of the model they have."""
        return f"step {self.step} of {self.world_size} ranks, policy {self.policy_hash}"

    def is_laid_out_as(self, now: StateHeader) -> bool:
        then = self.layout, self.world_size, self.parts
        return then == (now.layout, now.world_size, now.parts)

    @classmethod
    def from_strings(cls, strings: Mapping[str, object], where: str) -> StateHeader:
        """The inverse of :meth:`to_strings`; ``where`` names the file in messages."""
        if strings.get("format") != str(FORMAT):
            raise StateError(
                f"{where}: not a state of tagc that this version ({__version__}) reads: its "
                f"format is {strings.get('format')!r:.40}, not '{FORMAT}'"
            )
        try:
            header = cls.model_validate(strings)
        except ValidationError as error:
            raise StateError(f"{where}: {first_problem(error)}") from None
        if header.rank >= header.world_size:
            raise StateError(
                f"{where}: there is no rank {header.rank} of {header.world_size} ranks"
            )
        return header


def first_problem(error: ValidationError) -> str:
    first = error.errors()[0]
    return ": ".join([*map(str, first["loc"]), first["msg"]])


@dataclass
class RankState:
    """A rank's saved state. Its tensors are read and checked on first use; their dtypes and shapes
    are known before."""

    where: str  # names the state in messages
    metadata: Mapping[str, str]
    shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    _read: Callable[[], dict[str, Tensor]]
    _hint: str = ""  # what else may be the matter if the digest differs

    def __post_init__(self) -> None:
        self.header = StateHeader.from_strings(self.metadata, self.where)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors, by name, on the CPU or on their own device."""
        tensors = self._read()
        if not matches_digest(self.metadata, tensors):
            raise StateError(
                f"{self.where}: damaged: its content is not what was saved{self._hint}"
            )
        return tensors


class Source:
    """The states of all ranks that took part in one save, by rank; or (``alone``) of one of them,
    while others have their own sources. ``identity`` must be equal on all ranks that load."""

    def __init__(
        self, where: str, ranks: Mapping[int, RankState], save: str = "", *, alone: bool = False
    ) -> None:
        self.where, self.ranks, self.alone = where, ranks, alone
        self.first = next(iter(ranks.values())).header
        # With tensor parallelism, the parts of ranks may differ in size, and so their layouts.
        moments = {
            f"{h.moment}, layout {'of each rank' if h.parts else h.layout}"
            for h in (state.header for state in ranks.values())
        }
        if len(moments) != 1:
            raise StateError(
                f"{where}: its ranks are of different saves: {'; '.join(sorted(moments))}"
            )
        for rank, state in ranks.items():
            if state.header.rank != rank:
                raise StateError(
                    f"{where}: the state of rank {rank} says it is of rank {state.header.rank}"
                )
        self.identity = self.first.moment if alone else f"{save}{moments.pop()}"


def to_state_dict(
    header: StateHeader, tensors: Mapping[str, Tensor], sums: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """One rank's state, and its header as a tensor, under names that differ between ranks: torch's
    distributed checkpoints treat plain tensors with equal names on several ranks as copies, and
    save one of them."""
    start = (
        f"of_{header.world_size}_ranks.policy_{header.policy_hash[:12]}."
        f"layout_{header.layout[:12]}.rank_{header.rank}."
    )
    metadata = with_digest(header.to_strings(), tensors, sums)
    return {f"{start}{_ABOUT}": metadata_to_tensor(metadata)} | {
        f"{start}{name}": tensor for name, tensor in tensors.items()
    }


def from_state_dict(state_dict: Mapping[str, object]) -> Source:
    """The state of this rank in the result of :func:`to_state_dict`."""
    where = "the state dict"
    found = split_names(state_dict, where)
    if len(found) > 1:
        raise StateError(f"{where} has the states of {len(found)} ranks, not of one")
    ((rank, names),) = found.items()
    tensors: dict[str, Tensor] = {}
    for name, full in names.items():
        value = state_dict[full]
        if not isinstance(value, Tensor):
            raise StateError(f"{where}: {full} is not a tensor")
        tensors[name] = value
    metadata = metadata_from_tensor(tensors.pop(""), where)
    shapes = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    hint = "" if any(name.endswith(".noise") for name in tensors) else _NOISE
    state = RankState(where, metadata, shapes, lambda: tensors, hint)
    return Source(where, {rank: state}, alone=True)


# torch loads only the tensors that the state dict has now.
_NOISE = (
    ". Or dcp.load left out the noise that the saved run measured: call keep_rates(optimizer) or "
    "clip_grad_norm_ before it, as that run did, or load with tagc.compressor(model).load(folder)"
)


def metadata_to_tensor(metadata: Mapping[str, str]) -> Tensor:
    """Metadata as a tensor of fixed size: JSON, padded with spaces."""
    text = json.dumps(dict(metadata), ensure_ascii=False).encode()
    return torch.tensor(list(text.ljust(_ABOUT_BYTES)), dtype=torch.uint8, device="cpu")


def metadata_from_tensor(tensor: Tensor, where: str) -> dict[str, str]:
    """The inverse of :func:`metadata_to_tensor`; ``where`` names the tensor in messages."""
    if tensor.dtype != torch.uint8 or tensor.shape != (_ABOUT_BYTES,):
        raise StateError(f"{where}: its description is not {_ABOUT_BYTES} bytes")
    try:
        return _METADATA.validate_json(bytes(tensor.tolist()))
    except ValidationError as error:
        raise StateError(f"{where}: its description: {first_problem(error)}") from None


_METADATA = TypeAdapter(dict[str, str])
_NAME = re.compile(
    r"(of_[0-9]{1,9}_ranks\.policy_[0-9a-f]{12}\.layout_[0-9a-f]{12}\.rank_([0-9]{1,9}))\.(.*)",
    re.DOTALL,
)


def split_names(names: Iterable[object], where: str) -> dict[int, dict[str, str]]:
    """Split the names of :func:`to_state_dict`: for each rank, a dict from a tensor's own name to
    its full name. The header's own name is ``""``.
    """
    found: dict[int, dict[str, str]] = {}
    starts: dict[int, str] = {}
    for full in names:
        match = _NAME.fullmatch(full) if isinstance(full, str) else None
        if match is None:
            raise StateError(f"{where}: {full!r:.80} is not a name in a state of tagc. {DENSE}")
        rank = int(match[2])
        if starts.setdefault(rank, match[1]) != match[1]:
            raise StateError(f"{where}: rank {rank} has two states: {starts[rank]}, {match[1]}")
        name = "" if match[3] == _ABOUT else match[3]
        found.setdefault(rank, {})[name] = match[0]
    if not found:
        raise StateError(f"{where}: there is no state of tagc in it. {DENSE}")
    for rank, own in found.items():
        if "" not in own:
            raise StateError(f"{where}: the description of rank {rank} is missing")
    return found


DIGEST = "digest"

WIDTH = 1 << 14
"""Words of a row."""
# So that products take 32 MiB of a device at most, and fit a CPU's cache.
_ROWS, _ROWS_ON_CPU = 256, 16


class Copies(NamedTuple):
    """Contiguous copies on the host, and :func:`sums_of` each, by name. A GPU's tensors go to
    pinned memory one by one, so it holds one more tensor at most. Nothing waits for them:
    synchronize first."""

    tensors: dict[str, Tensor]
    sums: dict[str, Tensor]

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor that nothing else changes. One on the CPU is taken as it is."""
        packed = tensor.detach().contiguous()
        self.sums[name] = _on_host(sums_of(packed))
        self.tensors[name] = _on_host(packed)


def _on_host(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor
    pinned = tensor.is_cuda
    out = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
    return out.copy_(tensor, non_blocking=pinned)


def with_digest(
    metadata: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    sums: Mapping[str, Tensor] | None = None,
) -> dict[str, str]:
    """The metadata of a rank's tensors, with ``digest``: the SHA-256 of the metadata and of the
    tensors' names, dtypes, shapes and sums (of tensors on the CPU, if they are known)."""
    digest = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update((sums_of(tensor).cpu() if sums is None else sums[name]).numpy().data)
    return {**metadata, DIGEST: digest.hexdigest()}


def matches_digest(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> bool:
    """Whether metadata and tensors match the digest in the metadata; False without digest."""
    rest = {name: value for name, value in metadata.items() if name != DIGEST}
    return metadata == with_digest(rest, tensors)


def sums_of(tensor: Tensor) -> Tensor:
    """Two sums for every row of ``WIDTH`` 32-bit words of a tensor's elements in order: int64
    ``[rows, 2]`` on the tensor's device, the same on any device.

    A sum is ``x[0] * w[0] + x[1] * w[1] + ...`` modulo ``2**64``, for words ``x``, and weights
    ``w`` that are as good as random. For a given change of a row, at most one in ``2**33`` choices
    of weights leaves a sum as it was, and one in ``2**66`` leaves both: the family MULTILINEAR
    of Lemire and Kaser (Strongly universal string hashing is fast, 2014). The weights are public,
    so this detects damage, not changes on purpose.
    """
    numel = tensor.numel()
    # A single element counts as contiguous with any stride, but such a stride allows no view.
    content = tensor.detach().contiguous().as_strided((numel,), (1,)).view(torch.uint8)
    if content.storage_offset() % 4:
        content = content.clone()
    whole = content.numel() // (4 * WIDTH) * (4 * WIDTH)
    parts = [content[:whole].view(torch.int32).view(-1, WIDTH)]
    if whole < content.numel():
        last = functional.pad(content[whole:], (0, -content.numel() % 4))
        parts.append(last.view(torch.int32)[None])
    weights = _weights(tensor.device)
    return torch.cat([_sums_of_rows(part, weights[:, : part.shape[1]]) for part in parts])


def _sums_of_rows(rows: Tensor, weights: Tensor) -> Tensor:
    """The sums of ``rows`` ``[n, words]`` int32: int64 ``[n, 2]``."""
    sums = torch.empty(len(rows), 2, dtype=torch.int64, device=rows.device)
    count = _ROWS_ON_CPU if rows.device.type == "cpu" else _ROWS
    for first in range(0, len(rows), count):
        some = rows[first : first + count]
        for i in range(2):
            sums[first : first + count, i] = (some * weights[i]).sum(1)
    return sums


@cache
def _weights(device: torch.device) -> Tensor:
    """int64 ``[2, WIDTH]``: the first outputs of SplitMix64 (Steele, Lea and Flood, Fast splittable
    pseudorandom number generators, 2014) from seed 0."""
    z = np.arange(1, 2 * WIDTH + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return torch.from_numpy(z.view(np.int64).reshape(2, WIDTH)).to(device)
