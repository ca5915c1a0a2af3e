"""Where in a residual a parameter lies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.exact import EXACT
from tagc.checkpoint.locations import ParamLocation, locations
from tagc.plan import UnitInfo, UnitParam, build_plan
from tagc.policy import Policy


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_places(dim: int, shards: int) -> None:
    """Rows are what `chunk` gives, padded at their end."""
    shape = [4, 3, 2]
    # FSDP pads the first dimension only.
    shape[dim] = 7 if dim == 0 else 2 * shards
    whole = torch.randn(shape)
    chunk = -(-shape[dim] // shards)
    columns = whole.numel() // shape[dim] * chunk
    residual = torch.full((shards, columns + 5), torch.nan)
    for row, piece in zip(residual, whole.chunk(shards, dim), strict=False):
        row[2 : 2 + piece.numel()] = piece.flatten()
    param = UnitParam(name="p", shape=tuple(shape), columns=columns, dim=dim)
    place = ParamLocation(param=param, start=2, shards=shards, ranks=1)
    torch.testing.assert_close(place.take(residual), whole, **EXACT)
    written = torch.full_like(residual, torch.nan)
    place.put(written, whole)
    assert torch.equal(written[:, 2:-3].nan_to_num(), residual[:, 2:-3].nan_to_num())
    assert not written[:, 2:-3].isnan().any()
    assert written[:, :2].isnan().all()
    assert written[:, -3:].isnan().all()
    for shard in range(shards):
        place = ParamLocation(param=param, start=2, shards=shards, ranks=1, shard=shard)
        if place.numel:
            piece = whole.chunk(shards, dim)[shard]
            torch.testing.assert_close(place.take(residual[shard : shard + 1]), piece, **EXACT)
            written = torch.full((1, columns + 5), torch.nan)
            place.put(written, piece)
            assert torch.equal(place.take(written), piece)


def test_a_parameter_divided_in_another_way_is_named() -> None:
    """Half of its rows, by a placement that says nothing about which ones."""
    param = UnitParam(name="up.weight", shape=(128, 32), columns=1024, local=(32, 32))
    info = UnitInfo(name="block", params=(param,), world_size=2, dtype=torch.float32)
    rule = {"when": {"name": "*"}, "codec": {"kind": "quantized", "bits": 4}}
    (unit,) = build_plan([info], Policy.load({"schema": 1, "gradients": [rule]})).units
    with pytest.raises(
        ValueError,
        match=r"residual of up.weight cannot be saved.*1024 elements.*2048.*Shard and Replicate",
    ):
        list(locations(unit, {0: torch.zeros(2, 1024)}, 2, None))


def test_pieces_of_a_place() -> None:
    """A parameter of 7 elements that straddles rows, in other columns of each."""
    pieces: Any = (
        SimpleNamespace(row=0, column=3, offset=0, length=1),
        SimpleNamespace(row=1, column=0, offset=1, length=4),
        SimpleNamespace(row=2, column=1, offset=5, length=2),
    )
    param = UnitParam(name="p", shape=(7, 1), columns=4)
    place = ParamLocation(param=param, start=0, shards=3, ranks=1, pieces=pieces)
    residual = torch.full((3, 4), torch.nan)
    value = torch.arange(1.0, 8.0)[:, None]
    place.put(residual, value)
    assert torch.equal(place.take(residual), value)
    rows = [[0, 0, 0, 1], [2, 3, 4, 5], [0, 6, 7, 0]]
    assert residual.nan_to_num().tolist() == rows
