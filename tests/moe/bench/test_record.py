"""Holds a run to its ceilings, its ratios, its time, and to saying what it left out."""

from __future__ import annotations

import pytest
import torch

from receipt_samples import COMMIT, layer_case, parallel_row, preparation
from trellis_kernels.bench.timing import Samples
from trellis_moe.bench.machine import Commit
from trellis_moe.bench.record import COPY, GEMM, Recorder, decode_ceiling, describe, pinned_copy
from trellis_moe.errors import MoeValueError
from trellis_moe.receipts.schema import Check, OpCase, PrepareCase, Receipt

CPU = torch.device("cpu")
GOOD = Check(reference="float64", error=1e-4, bound=1e-3)
HERE = Commit(COMMIT, False)


def make_recorder(lines: list[str] | None = None, seconds: float = 60.0) -> Recorder:
    recorder = Recorder(CPU, seconds=seconds, samples=5, tell=(lines if lines is not None else []).append)
    recorder.add_ceiling(COPY, "bytes", 4_000_000, Samples((1000,) * 5))
    recorder.add_ceiling(GEMM, "flops", 800_000_000, Samples((1000,) * 5))
    return recorder


def test_a_row_has_its_rates_over_ceilings_of_the_run() -> None:
    recorder = make_recorder()
    recorder.add_ceiling(decode_ceiling("mul1", "3"), "weights", 6_000_000, Samples((1000,) * 5))
    row = recorder.add_row(
        layer_case(), Samples((2000,) * 5), nbytes=4_000_000, flops=160_000_000, weights=3_000_000, check=GOOD
    )
    assert [(ratio.of, ratio.value) for ratio in row.ratios] == [
        ("device copy", 0.5), ("bf16 GEMM", 0.1), ("decode mul1 K=3 from registers", 0.25),
    ]  # fmt: skip
    receipt = recorder.receipt("a command", HERE)
    assert receipt.rows == (row,)
    assert Receipt.model_validate_json(receipt.model_dump_json(by_alias=True)) == receipt


def test_only_what_was_counted_and_measured_has_a_ratio() -> None:
    recorder = make_recorder()
    case = OpCase(op="decode", case="mul1 K=3", mode="eager")
    row = recorder.add_row(case, Samples((1000,) * 5), nbytes=1_000_000, flops=0, weights=5, check=GOOD)
    assert [ratio.of for ratio in row.ratios] == [COPY]


def test_a_preparation_is_held_to_its_own_copy() -> None:
    recorder = make_recorder()
    copy, given = preparation("a layer", 1 << 24, share=0.5)
    assert isinstance(given.case, PrepareCase)
    recorder.add_ceiling(pinned_copy("a layer", 1 << 24), "bytes", copy.work, Samples(copy.samples_ns))
    row = recorder.add_row(
        given.case, Samples(given.samples_ns), nbytes=given.bytes, flops=0, weights=0, check=GOOD, memory=given.memory
    )
    assert [(ratio.of, ratio.value) for ratio in row.ratios] == [("pinned copy beside a layer, bound 16 MiB", 0.5)]


def test_what_fails_is_left_out_and_said() -> None:
    lines: list[str] = []
    recorder = make_recorder(lines)

    def bad() -> None:
        check = Check(reference="float64", error=2e-3, bound=1e-3)
        recorder.add_row(layer_case(), Samples((2000,) * 5), nbytes=1, flops=0, weights=0, check=check)

    def good() -> None:
        recorder.add_row(layer_case(), Samples((2000,) * 5), nbytes=1, flops=0, weights=0, check=GOOD)

    assert not recorder.attempt("a wrong layer", bad)
    assert recorder.attempt("a layer", good)
    (skipped,) = recorder.receipt("a command", HERE).skipped
    assert skipped.what == "a wrong layer"
    assert "above its bound" in skipped.why
    assert any("left out a wrong layer" in line for line in lines)


def test_a_ceiling_that_rows_have_their_ratio_to_is_not_replaced() -> None:
    recorder = make_recorder()
    recorder.add_row(layer_case(), Samples((2000,) * 5), nbytes=4_000_000, flops=0, weights=0, check=GOOD)
    with pytest.raises(ValueError, match="device copy was measured before"):
        recorder.add_ceiling(COPY, "bytes", 8_000_000, Samples((1000,) * 5))
    assert recorder.receipt("a command", HERE).ceiling(COPY).work == 4_000_000


def test_a_receipt_of_a_run_that_goes_on_says_so() -> None:
    recorder = make_recorder()
    recorder.add_row(layer_case(), Samples((2000,) * 5), nbytes=4_000_000, flops=0, weights=0, check=GOOD)
    assert [each.what for each in recorder.receipt("a command", HERE, goes_on=True).skipped] == ["the rest"]
    assert recorder.receipt("a command", HERE).skipped == ()


def test_nothing_is_begun_after_the_time() -> None:
    recorder = make_recorder(seconds=-1.0)
    begun: list[str] = []
    assert not recorder.attempt("a layer", lambda: begun.append("a layer"))
    assert begun == []


def test_an_interrupt_ends_the_run() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_recorder().attempt("a layer", interrupt)


def test_without_a_row_there_is_no_receipt() -> None:
    recorder = make_recorder()
    recorder.skip("a layer", "it was refused")
    with pytest.raises(MoeValueError, match="a layer: it was refused"):
        recorder.receipt("a command", HERE)


def test_cases_have_one_line_each() -> None:
    assert describe(layer_case()) == "GLM-4.5-Air K=3 mul1, 8 tokens, trellis exact moe_small, graph"
    assert describe(OpCase(op="decode", case="mcg K=4", mode="graph")) == "decode, mcg K=4, graph"
    assert describe(parallel_row(2, 8, 100).case) == "GLM-4.5-Air K=3 mul1, 8 tokens, tp2 all_reduce float32, graph"
    assert describe(preparation("a layer", 1 << 24, share=1.0)[1].case) == "prepare a layer, 1 held, bound 16 MiB"
