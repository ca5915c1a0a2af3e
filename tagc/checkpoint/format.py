"""The format of a saved state: named tensors of one rank, and a header that describes them.

Everything is a tensor, including the header, so neither saving nor loading needs pickle.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from tagc.basics.version import __version__
from tagc.checkpoint.digest import has_digest, matches_digest, with_digest

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
# The former name; such states are still read.
_FORMER_ABOUT = "about_if_missing_load_by_tagc_Compressor_load"
BY_HANDLE = "call load(folder) on the same handle, with the checkpoint's folder"
DENSE = (
    "If it is from training without tagc, there is nothing to load: leave this out, and training "
    "continues with zero residuals"
)
"""What to do with a checkpoint that has no state."""


class StateError(ValueError):
    """A state that cannot be loaded, or only with loss."""


@dataclass(frozen=True, kw_only=True)
class StateHeader:
    """The origin of a state.

    Attributes:
        policy: the policy's name, for messages.
        policy_hash: see :attr:`tagc.Policy.hash`.
        layout: fingerprint of the plan.
        world_size, rank: number of processes, and this rank among them.
        step: number of reductions so far: the largest of any unit.
        version: version of tagc.
        parts: hash of the parts of parameters that tensor parallelism gave the rank; empty without
            tensor parallelism, and in states of earlier versions.
    """

    policy: str
    policy_hash: str
    layout: str
    world_size: int
    rank: int
    step: int
    version: str = __version__
    parts: str = ""

    def to_strings(self) -> dict[str, str]:
        """The header as metadata of a file."""
        said = {field.name: str(getattr(self, field.name)) for field in fields(self)}
        said["policy"] = said["policy"][:_LONGEST_NAME].encode("utf-8", "replace").decode()
        if not self.parts:
            del said["parts"]
        return {"format": str(FORMAT), **said}

    @property
    def moment(self) -> str:
        """Text that is equal on all ranks of one save, whatever part of the model they have."""
        return f"step {self.step} of {self.world_size} ranks, policy {self.policy_hash}"

    def is_laid_out_as(self, now: StateHeader) -> bool:
        """Whether a saved state fits a rank without redistribution."""
        then = self.layout, self.world_size
        return then == (now.layout, now.world_size) and self.parts in ("", now.parts)

    @classmethod
    def from_strings(cls, said: Mapping[str, object], where: str) -> StateHeader:
        """The inverse of :meth:`to_strings`.

        Raises:
            StateError: if a value is missing or not valid; the message names ``where``.
        """
        if said.get("format") != str(FORMAT):
            raise StateError(
                f"{where}: not a state of tagc that this version ({__version__}) reads: its "
                f"format is {said.get('format')!r:.40}, not '{FORMAT}'"
            )
        values: dict[str, str] = {}
        for field in fields(cls):
            value = said.get(field.name, "" if field.name == "parts" else None)
            if not isinstance(value, str):
                raise StateError(f"{where}: {field.name} is missing from its metadata")
            values[field.name] = value
        for name in ("policy_hash", "layout"):
            if not re.fullmatch("[0-9a-f]{64}", values[name]):
                raise StateError(f"{where}: {name} is not a SHA-256 but {values[name]!r:.40}")
        numbers = {name: _number(values[name], name, where) for name in _NUMBERS}
        if numbers["rank"] >= numbers["world_size"]:
            raise StateError(
                f"{where}: there is no rank {numbers['rank']} of {numbers['world_size']} ranks"
            )
        return cls(
            policy=values["policy"],
            policy_hash=values["policy_hash"],
            layout=values["layout"],
            version=values["version"],
            parts=values["parts"],
            **numbers,
        )


_NUMBERS = ("world_size", "rank", "step")


def _number(text: str, name: str, where: str) -> int:
    if not re.fullmatch("[0-9]{1,18}", text, re.ASCII):
        raise StateError(f"{where}: {name} is not a number but {text!r:.40}")
    return int(text)


class Source(Protocol):
    """The states of all ranks that took part in one save."""

    @property
    def where(self) -> str:
        """The source's name in messages."""
        ...

    @property
    def alone(self) -> bool:
        """Whether it has only the state of one rank, while other ranks have their own sources."""
        ...

    @property
    def identity(self) -> str:
        """Text that must be equal on all ranks that load together."""
        ...

    def headers(self) -> Mapping[int, StateHeader]:
        """The header of each saved rank."""
        ...

    def shapes(self, rank: int) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of each of a saved rank's tensors."""
        ...

    def read(self, rank: int, name: str) -> Tensor:
        """One of a saved rank's tensors, on the CPU or on its own device.

        Raises:
            StateError: if the bytes are not those that were saved.
        """
        ...


def to_state_dict(
    header: StateHeader, tensors: Mapping[str, Tensor], sums: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """One rank's state under names that differ between ranks: torch's distributed checkpoints treat
    plain tensors with equal names on several ranks as copies, and save one of them.

    The header is also a tensor. It has the digest of everything else; see :func:`check_digest`.

    Args:
        sums: as for :func:`tagc.checkpoint.digest.with_digest`.
    """
    start = (
        f"of_{header.world_size}_ranks.policy_{header.policy_hash[:12]}."
        f"layout_{header.layout[:12]}.rank_{header.rank}."
    )
    metadata = with_digest(header.to_strings(), tensors, sums)
    return {f"{start}{_ABOUT}": metadata_to_tensor(metadata)} | {
        f"{start}{name}": tensor for name, tensor in tensors.items()
    }


def metadata_to_tensor(metadata: Mapping[str, str]) -> Tensor:
    """Metadata as a tensor of fixed size: JSON, padded with spaces."""
    text = json.dumps(dict(metadata), ensure_ascii=False).encode()
    return torch.tensor(list(text.ljust(_ABOUT_BYTES)), dtype=torch.uint8, device="cpu")


def metadata_from_tensor(tensor: Tensor, where: str) -> dict[str, str]:
    """The inverse of :func:`metadata_to_tensor`.

    Raises:
        StateError: if the tensor is not valid metadata; the message names ``where``.
    """
    if tensor.dtype != torch.uint8 or tensor.shape != (_ABOUT_BYTES,):
        raise StateError(f"{where}: its description is not {_ABOUT_BYTES} bytes")
    try:
        metadata = json.loads(bytes(tensor.tolist()).decode())
    except (ValueError, RecursionError):
        raise StateError(f"{where}: its description is not JSON") from None
    if not isinstance(metadata, dict):
        raise StateError(f"{where}: its description is not a JSON object")
    for name, value in metadata.items():
        if not isinstance(value, str):
            raise StateError(f"{where}: {name:.40} in its description is not text")
    return metadata


def check_digest(metadata: Mapping[str, str], tensors: Mapping[str, Tensor], where: str) -> None:
    """Check that a rank's state equals what was given to :func:`to_state_dict`.

    States of earlier versions, which have no digest, are not checked.

    Args:
        tensors: all tensors of the rank except the header, by their own names.

    Raises:
        StateError: if the state differs.
    """
    if has_digest(metadata) and not matches_digest(metadata, tensors):
        hint = "" if any(name.endswith(".noise") for name in tensors) else _NOISE
        raise StateError(f"{where}: damaged: its content is not what was saved{hint}")


# torch loads only the tensors that the state dict has now.
_NOISE = (
    ". Or dcp.load left out the noise that the saved run measured: call keep_rates(optimizer) or "
    "clip_grad_norm_ before it, as that run did, or load with tagc.compressor(model).load(folder)"
)

_NAME = re.compile(
    r"(of_[0-9]{1,9}_ranks\.policy_[0-9a-f]{12}\.layout_[0-9a-f]{12}\.rank_([0-9]{1,9}))\.(.*)",
    re.DOTALL,
)


def split_names(names: object, where: str) -> dict[int, dict[str, str]]:
    """Split the names of :func:`to_state_dict`: for each rank, a dict from a tensor's own name to
    its full name. The header's own name is ``""``.

    Raises:
        StateError: if there are other names, or none.
    """
    found: dict[int, dict[str, str]] = {}
    starts: dict[int, str] = {}
    for full in names if isinstance(names, list) else []:
        match = _NAME.fullmatch(full) if isinstance(full, str) else None
        if match is None:
            raise StateError(f"{where}: {full!r:.80} is not a name in a state of tagc. {DENSE}")
        rank = int(match[2])
        if starts.setdefault(rank, match[1]) != match[1]:
            raise StateError(f"{where}: rank {rank} has two states: {starts[rank]}, {match[1]}")
        name = "" if match[3] in (_ABOUT, _FORMER_ABOUT) else match[3]
        found.setdefault(rank, {})[name] = full
    if not found:
        raise StateError(f"{where}: there is no state of tagc in it. {DENSE}")
    for rank, own in found.items():
        if "" not in own:
            raise StateError(f"{where}: the description of rank {rank} is missing")
    return found


class OneRank:
    """A :class:`Source` of this rank's own state dict; other ranks have theirs."""

    alone = True

    def __init__(self, state_dict: Mapping[str, Tensor]) -> None:
        self.where = "the state dict"
        found = split_names(list(state_dict), self.where)
        if len(found) > 1:
            raise StateError(f"{self.where} has the states of {len(found)} ranks, not of one")
        ((self.rank, self._names),) = found.items()
        self._tensors = state_dict
        for full in self._names.values():
            if not isinstance(state_dict[full], Tensor):
                raise StateError(f"{self.where}: {full} is not a tensor")
        self._metadata = metadata_from_tensor(state_dict[self._names[""]], self.where)
        self._headers = {self.rank: StateHeader.from_strings(self._metadata, self.where)}
        check_together(self._headers, self.where)
        self.identity = self._headers[self.rank].moment

    def headers(self) -> Mapping[int, StateHeader]:
        """The header of this state dict's rank."""
        return self._headers

    def shapes(self, rank: int) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {name: (t.dtype, tuple(t.shape)) for name, t in self._own_tensors().items()}

    def read(self, rank: int, name: str) -> Tensor:
        return self._checked_tensors[name]

    def _own_tensors(self) -> dict[str, Tensor]:
        return {name: self._tensors[full] for name, full in self._names.items() if name}

    @cached_property
    def _checked_tensors(self) -> dict[str, Tensor]:
        tensors = self._own_tensors()
        check_digest(self._metadata, tensors, self.where)
        return tensors


def check_together(headers: Mapping[int, StateHeader], where: str) -> str:
    """Check that states are of one save, and return the text that identifies it.

    Raises:
        StateError: if they are not of one save.
    """
    # With tensor parallelism, the parts of ranks may differ in size, and so their layouts.
    said = {
        f"{about.moment}, layout {'of each rank' if about.parts else about.layout}"
        for about in headers.values()
    }
    if len(said) != 1:
        raise StateError(f"{where}: its ranks are of different saves: {'; '.join(sorted(said))}")
    for rank, about in headers.items():
        if about.rank != rank:
            raise StateError(f"{where}: the state of rank {rank} says it is of rank {about.rank}")
    return said.pop()
