"""The committed record of the GPU kernels' counts, and what is counted anew beside it.

A few operators are; all of them with ``make test-device``.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")

from benchmarks.counts import RECORD
from benchmarks.counts.cases import CASES, Case
from benchmarks.counts.count import count
from benchmarks.counts.operators import OPERATORS
from benchmarks.counts.steps import count_step
from benchmarks.counts.table import key_of, table
from benchmarks.records import Record, read
from tagc.costs.shapes import synthetic
from tagc.policy import data_parallel_policies

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("counts")]


@pytest.fixture(scope="module")
def record() -> dict[str, Record]:
    return {key_of(r): r for r in read([RECORD])}


def test_the_record_has_every_case(record):
    steps = {policy for policy in data_parallel_policies() if policy not in ("auto", "dense")}
    cases = {case.name for case in CASES}
    assert record.keys() == cases | steps
    assert {case.op for case in CASES} == set(OPERATORS)
    assert RECORD.stat().st_size < 200_000
    text = table(record.values())
    assert "not measured" in text
    assert "| share |" in text


def test_every_key_is_counted_and_peeled_once(record):
    """An addition for each of its cells; then a bit and an addition for each but one."""
    one = record["decode/bfloat16/float32/2 rows/5%/int8x4"]
    keys, hashes = int(one["note"].split()[0]), 4
    assert one["kernels"]["keys"]["atomics"] == pytest.approx(hashes * keys, rel=0.01)
    assert one["kernels"]["peel"]["atomics"] == pytest.approx(hashes * keys, rel=0.03)
    assert one["kernels"]["estimate"]["atomics"] == 0


def test_every_element_of_a_message_is_read_and_added_once(record):
    """However its loop is unrolled: a thread reads a value, or a zero, for every element."""
    found = [r for r in record.values() if r.get("op") == "unpack" and r["group"] == 1]
    assert found
    for one in found:
        assert one["pipes"]["shared"] >= 1, one["case"]
        assert one["pipes"]["fma"] >= 1, one["case"]


def recount(case: Case, record: dict[str, Record]) -> None:
    """Launches, bytes and atomics are the record's whatever compiles; by the record's compiler
    everything is."""
    found, held = count(case), record[case.name]
    if found["triton"] == held["triton"]:
        assert found == held
    for counted in ("launches", "bytes", "atomics", "floor_bytes", "note"):
        assert found[counted] == held[counted], counted


# All that is in the record is recounted with the mark `device`; of two operators, one case here.
@pytest.mark.parametrize("op", ["quantize", "dequantize"])
def test_the_record_is_todays(op, record):
    recount(next(case for case in CASES if case.op == op), record)


@pytest.mark.device
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_all_of_the_record_is_todays(case, record):
    recount(case, record)


def test_the_launches_of_steps_are_todays(record):
    for policy in (r["policy"] for r in record.values() if "policy" in r):
        found = count_step(policy)
        for counted in ("launches_per_block", "launches_per_step"):
            assert found[counted] == record[policy][counted], policy
    small = count_step("loco-4bit", synthetic(10_000_000))
    of_a_block = record["loco-4bit"]["launches_per_block"]
    assert small["blocks"] < record["loco-4bit"]["blocks"]
    assert small["launches_per_block"] == of_a_block
