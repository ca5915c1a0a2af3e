"""Every shipped policy sends less than dense bf16."""

from __future__ import annotations

import pytest

from support.marks import slow
from tagc.costs.candidates import Advisor, Question
from tagc.costs.link import Link
from tagc.costs.shapes import synthetic
from tagc.policy import Policy, data_parallel_policies

SENDS = [name for name in data_parallel_policies() if name != "dense"]


@pytest.mark.parametrize(
    ("numel", "ranks", "per_host"),
    [(3 * 10**8, 512, 8), *(slow(7 * 10**9, *at) for at in ((2, 1), (512, 1), (16, 8), (512, 8)))],
)
def test_every_policy_sends_less_than_dense_bf16(numel: int, ranks: int, per_host: int) -> None:
    """Bytes of a step that leave a host: parameters gathered in bf16, fp32 gradients."""
    link = Link(bandwidth=1.25e9, ranks_per_host=per_host)
    question = Question(shapes=synthetic(numel), world_size=ranks, link=link)
    advisor = Advisor(question, [Policy.load(name) for name in SENDS])
    assert not advisor.refused
    sent = {c.name: advisor.cost(c).wire_bytes for c in advisor.candidates}
    assert {*SENDS} <= sent.keys()
    for name in SENDS:
        assert sent[name] < 0.95 * sent["dense bf16"], name
