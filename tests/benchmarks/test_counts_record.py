"""The committed record of the GPU kernels' counts, and what is counted anew beside it.

A few operators are; all of them with ``make test-device``.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")

import tagc
from benchmarks.counts import RECORD
from benchmarks.counts.compare import all_worse, key
from benchmarks.counts.count import count
from benchmarks.counts.machines import MACHINES
from benchmarks.counts.operators import OPERATORS
from benchmarks.counts.steps import count_step
from benchmarks.counts.table import table
from benchmarks.counts.variants import quick, variants
from benchmarks.counts.work import Work
from benchmarks.records import Record, read
from tagc.costs.shapes import synthetic

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("counts")]


@pytest.fixture(scope="module")
def record() -> list[Record]:
    return read([RECORD])


def test_the_record_has_every_operator(record):
    held = {key(r) for r in record}
    assert {("H100", work.name) for work in quick()} <= held
    assert {w.op for w in quick()} == set(OPERATORS)
    assert len({work.name for work in variants()}) == len(variants())
    assert RECORD.stat().st_size < 200_000
    text = table(record)
    assert "not measured" in text
    assert "share on H100" in text


def test_every_key_is_counted_and_peeled_once(record):
    """An addition for each of its cells; then a bit and an addition for each but one."""
    (one,) = [r for r in record if r.get("case") == "decode/bfloat16/float32/2 rows/5%/int8x4"
              and r["machine"] == "H100"]  # fmt: skip
    keys, hashes = int(one["note"].split(": ")[1].split()[0]), 4
    assert one["kernels"]["keys"]["atomics"] == pytest.approx(hashes * keys, rel=0.01)
    assert one["kernels"]["peel"]["atomics"] == pytest.approx(hashes * keys, rel=0.03)
    assert one["kernels"]["estimate"]["atomics"] == 0


def test_every_element_of_a_message_is_read_and_added_once(record):
    """However its loop is unrolled: a thread reads a value, or a zero, for every element."""
    found = [r for r in record if r.get("op") == "unpack" and r["group"] == 1]
    assert found
    for one in found:
        name = (one["case"], one["machine"])
        assert one["pipes"]["shared"] >= 1, name
        assert one["pipes"]["fma"] >= 1, name


def recount(works: list[Work], machine: str, record: list[Record]) -> None:
    found = [count(work, MACHINES[machine]) for work in works]
    assert all_worse(found, record) == []


# All that is in the record is recounted with the mark `device`; of three operators, one case here.
def test_no_operator_got_slower(record):
    ops = {"quantize", "dequantize", "dequantize_matrix"}
    works = {work.op: work for work in reversed(variants()) if work.op in ops}
    recount([*works.values()], "H100", record)


@pytest.mark.device
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("op", OPERATORS)
def test_no_variant_got_slower(op, record):
    held = {key(r) for r in record}
    works = [work for work in variants() if work.op == op and ("H100", work.name) in held]
    assert works
    recount(works, "H100", record)


def test_no_step_launches_more(record):
    found = {r["policy"]: count_step(r["policy"]) for r in record if "policy" in r}
    assert {*found} == {*tagc.policies()} - {"auto", "dense"}
    assert all_worse(found.values(), record) == []
    small = count_step("loco-4bit", synthetic(10_000_000))
    assert small["blocks"] < found["loco-4bit"]["blocks"]
    assert small["launches_per_block"] == found["loco-4bit"]["launches_per_block"]
