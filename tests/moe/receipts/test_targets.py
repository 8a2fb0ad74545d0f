"""Holds each kind of figure to the rows that it reads, on both sides of what was asked."""

from __future__ import annotations

import pytest

from receipt_samples import layer_row, make_receipt, op_row, parallel_row, preparation
from trellis_moe.receipts.schema import Ceiling, Memory, Receipt, Row
from trellis_moe.receipts.targets import (
    CeilingRate,
    EagerCost,
    FinalBytes,
    LayerTime,
    NoCliff,
    NoSlower,
    OpRate,
    OpSlowdown,
    OpTime,
    Scratch,
    Speedup,
    StagingPeak,
    StagingRate,
    Target,
)

GLM = ("GLM-4.5-Air", "mul1", "3")
MIB = 1 << 20


def receipts(*rows: Row) -> list[Receipt]:
    return [make_receipt(rows)]


def verdict(target: Target, *rows: Row) -> tuple[str, bool] | None:
    found = target.found(receipts(*rows))
    return None if found is None else (found.text, found.met)


def test_time_of_a_layer_is_that_of_the_fastest_arithmetic() -> None:
    target = LayerTime(*GLM, 8, 0.155)
    assert target.title == "GLM-4.5-Air K=3 mul1, 8 tokens"
    assert target.asked == "0.155 ms"
    exact, in_bytes = layer_row(8, 206_000), layer_row(8, 155_000, arithmetic="bytes")
    assert verdict(target, exact) == ("0.206 ms (exact)", False)
    assert verdict(target, exact, in_bytes) == ("0.155 ms (bytes)", True)


@pytest.mark.parametrize(
    "other",
    [
        {"mode": "eager"}, {"contender": "bf16 grouped GEMM"}, {"geometry": "another"}, {"codebook": "mcg"}, {"k": "4"},
    ],
    ids=str,
)  # fmt: skip
def test_time_of_a_layer_is_of_no_other_case(other: dict[str, str]) -> None:
    assert verdict(LayerTime(*GLM, 8, 0.155), layer_row(8, 1_000, **other), layer_row(9, 1_000)) is None


def test_eager_beyond_graph_is_of_one_arithmetic() -> None:
    target = EagerCost(*GLM, 8, 10.0)
    rows = [layer_row(8, 200_000), layer_row(8, 150_000, arithmetic="bytes")]
    assert verdict(target, *rows, layer_row(8, 204_000, mode="eager")) == ("4.0 us", True)
    assert verdict(target, *rows, layer_row(8, 211_000, mode="eager")) == ("11.0 us", False)
    assert verdict(target, *rows, layer_row(8, 151_000, mode="eager", arithmetic="other")) is None


def test_no_cliff_is_the_largest_fall_between_neighbours() -> None:
    target = NoCliff(*GLM, 0.05, counts=3)
    rows = [layer_row(1, 100_000), layer_row(8, 200_000), layer_row(16, 192_000)]
    assert verdict(target, *rows) == ("4.0% over 3 counts", True)
    assert verdict(target, *rows, layer_row(32, 150_000)) == ("21.9% over 4 counts", False)
    assert verdict(target, *rows[:2]) is None
    assert verdict(NoCliff(*GLM, 0.05, counts=2), *rows[:2]) == ("0.0% over 2 counts", True)


def test_no_slower_reads_both_from_one_receipt() -> None:
    target = NoSlower(*GLM, 1024, "bf16 grouped GEMM")
    ours, other = layer_row(1024, 1_100_000), layer_row(1024, 1_000_000, contender="bf16 grouped GEMM")
    assert verdict(target, ours, other) == ("1.10 x", False)
    assert verdict(target, ours, layer_row(1024, 1_250_000, contender="bf16 grouped GEMM")) == ("0.88 x", True)
    assert target.found([make_receipt([ours]), make_receipt([other])]) is None


def test_scratch_is_what_the_plan_says_and_no_more_is_taken() -> None:
    target = Scratch(*GLM, 4096, 320 * MIB)
    fits = Memory(planned_bytes=319 * MIB, final_bytes=319 * MIB)
    assert verdict(target, layer_row(4096, 1_000, memory=fits)) == ("319.0 MiB", True)
    more = Memory(planned_bytes=319 * MIB, final_bytes=319 * MIB + 1)
    assert verdict(target, layer_row(4096, 1_000, memory=more)) == ("319.0 MiB", False)
    large = Memory(planned_bytes=320 * MIB, final_bytes=320 * MIB)
    assert verdict(target, layer_row(4096, 1_000, memory=large)) == ("320.0 MiB", False)
    assert verdict(target, layer_row(4096, 1_000)) is None


def test_time_of_an_op() -> None:
    target = OpTime("pack_routes", "128 routes", 6.0)
    assert verdict(target, op_row("pack_routes", "128 routes", 5_900)) == ("5.9 us", True)
    assert verdict(target, op_row("pack_routes", "128 routes", 6_000)) == ("6.0 us", False)
    assert verdict(target, op_row("pack_routes", "129 routes", 5_900)) is None


def test_rate_of_an_op_is_a_share_of_the_copy() -> None:
    target = OpRate("decode", "mcg K=4", 0.7)
    assert verdict(target, op_row("decode", "mcg K=4", 500, 1_400_000)) == ("70.0%", True)
    assert verdict(target, op_row("decode", "mcg K=4", 500, 1_380_000)) == ("69.0%", False)
    assert verdict(target, op_row("decode", "mcg K=3", 500)) is None


def test_slowdown_of_an_op() -> None:
    target = OpSlowdown("pack_routes", "many, stable", "many, unordered", 1.3)
    assert target.title == "pack_routes, many, stable, over unordered"
    stable = op_row("pack_routes", "many, stable", 19_000)
    assert verdict(target, stable, op_row("pack_routes", "many, unordered", 15_000)) == ("1.27 x", True)
    assert verdict(target, stable, op_row("pack_routes", "many, unordered", 14_000)) == ("1.36 x", False)
    assert verdict(target, stable) is None


def test_rate_of_a_ceiling() -> None:
    ceiling = Ceiling(name="decode mcg K=3 from registers", unit="weights", work=6_500_000, samples_ns=(1000,) * 5)
    made = [make_receipt([layer_row(8, 1_000)], ceilings=[ceiling])]
    assert CeilingRate(ceiling.name, 6.5e12).found(made).met  # type: ignore[union-attr]  # None fails the test
    assert not CeilingRate(ceiling.name, 6.6e12).found(made).met  # type: ignore[union-attr]  # likewise
    recorded = CeilingRate(ceiling.name)
    assert (recorded.asked, recorded.found(made).text) == ("recorded", "6.50 T/s")  # type: ignore[union-attr]  # likewise
    assert CeilingRate("decode 3inst").found(made) is None


def test_rate_and_peaks_of_a_preparation() -> None:
    copy, row = preparation("1 GB layer", 64 * MIB, share=0.8, host=96 * MIB, device=65 * MIB)
    made = [make_receipt([row], ceilings=[copy])]
    assert StagingRate("1 GB layer", 64 * MIB, 0.8).found(made).text == "80%, 40.0 GB/s"  # type: ignore[union-attr]  # likewise
    assert StagingRate("1 GB layer", 64 * MIB, 0.8).found(made).met  # type: ignore[union-attr]  # likewise
    assert not StagingRate("1 GB layer", 64 * MIB, 0.81).found(made).met  # type: ignore[union-attr]  # likewise
    assert StagingRate("1 GB layer", 16 * MIB, 0.6).found(made) is None
    for place, above in (("host", 32), ("device", 1)):
        assert StagingPeak("1 GB layer", 64 * MIB, place, above * MIB).found(made).met  # type: ignore[union-attr]  # likewise
        assert not StagingPeak("1 GB layer", 64 * MIB, place, above * MIB - 1).found(made).met  # type: ignore[union-attr]  # likewise
    assert FinalBytes("1 GB layer", 49_000_000).found(made).met  # type: ignore[union-attr]  # likewise
    assert not FinalBytes("1 GB layer", 49_000_001).found(made).met  # type: ignore[union-attr]  # likewise


def test_a_peak_that_is_unknown_is_not_measured() -> None:
    copy, row = preparation("1 GB layer", 64 * MIB, share=0.8, host=None)
    assert StagingPeak("1 GB layer", 64 * MIB, "host", 32 * MIB).found([make_receipt([row], ceilings=[copy])]) is None


def test_speedup_is_over_one_rank_of_the_same_run() -> None:
    target = Speedup(*GLM, "tp", 2, 8192, 1.8)
    one, two = parallel_row(1, 8192, 5_400_000), parallel_row(2, 8192, 3_000_000)
    assert verdict(target, one, two) == ("1.80 x", True)
    assert verdict(target, one, parallel_row(2, 8192, 3_100_000)) == ("1.74 x", False)
    assert verdict(target, one, parallel_row(2, 8192, 2_000_000, mode="eager")) is None
    assert verdict(target, two) is None


def test_the_last_receipt_counts() -> None:
    target = OpTime("pack_routes", "128 routes", 6.0)
    made = [make_receipt([op_row("pack_routes", "128 routes", median)]) for median in (5_000, 7_000)]
    assert target.found(made).text == "7.0 us"  # type: ignore[union-attr]  # None fails the test
