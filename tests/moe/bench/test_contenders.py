"""Holds contenders to the same codes and to checked outputs, in turns with the layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from trellis_format.activations import Activation
from trellis_format.codebooks import CODEBOOKS
from trellis_format.rates import Rate
from trellis_format.tiles import decode_inner
from trellis_kernels.bench.timing import Samples
from trellis_moe.bench.contenders import DECODED, GroupedLayer, compare, compare_cpu, contender_keys
from trellis_moe.bench.layers import LayerBench
from trellis_moe.bench.presets import TINY
from trellis_moe.bench.record import COPY, Recorder
from trellis_moe.errors import MoeUnsupportedError
from trellis_moe.receipts.figures import UNQUANTISED
from trellis_moe.receipts.schema import LayerCase

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bench() -> LayerBench:
    return LayerBench(TINY, CPU)


@pytest.fixture(scope="module")
def decoded(bench: LayerBench) -> GroupedLayer:
    return GroupedLayer(bench.layers[0])


def make_recorder() -> Recorder:
    recorder = Recorder(CPU, seconds=60.0, samples=5, tell=lambda line: None)
    recorder.add_ceiling(COPY, "bytes", 1000, Samples((1000,) * 5))
    return recorder


def test_matrices_are_the_codes_of_their_expert_rounded_to_bfloat16(bench: LayerBench, decoded: GroupedLayer) -> None:
    experts = bench.layers[0]
    for projection, found in enumerate((decoded.gate, decoded.up, decoded.down)):
        for expert in (0, TINY.experts - 1):
            codes, rate = experts.tiles(expert, projection)
            wanted = torch.from_numpy(decode_inner(codes.numpy(), CODEBOOKS[TINY.codebook], rate))
            assert torch.equal(found[expert], wanted.bfloat16())


def test_products_are_those_of_each_rows_expert(decoded: GroupedLayer) -> None:
    rows = (torch.randn(7, 128, generator=torch.Generator().manual_seed(0)) * 0.1).bfloat16()
    ends = torch.tensor([2, 2, 6, 7], dtype=torch.int32)
    for multiply in (decoded.multiply, decoded.decode_and_multiply):
        out = torch.full_like(rows, torch.nan)
        multiply(rows, ends, out)
        assert decoded.error(rows, ends, out) < 1.2e-2
        out[3] = out[2]
        assert decoded.error(rows, ends, out) > 0.1


def test_a_comparison_has_a_row_of_each(bench: LayerBench, decoded: GroupedLayer) -> None:
    recorder = make_recorder()
    compare(recorder, bench, 3, decoded=decoded)
    rows = {row.case.contender: row for row in recorder.rows if isinstance(row.case, LayerCase)}
    assert list(rows) == ["trellis", UNQUANTISED, DECODED]
    assert all(row.check.error <= row.check.bound for row in rows.values())
    assert rows[UNQUANTISED].flops == rows["trellis"].flops
    weights = TINY.experts * 3 * 128 * 128
    assert rows[DECODED].weights == weights
    assert rows[DECODED].bytes - rows[UNQUANTISED].bytes == 2 * weights + weights * 3 // 8


def test_a_wrong_contender_is_refused(bench: LayerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = GroupedLayer(bench.layers[0])
    monkeypatch.setattr(wrong, "multiply", lambda rows, ends, out: out.zero_())
    with pytest.raises(ValueError, match="above its bound"):
        compare(make_recorder(), bench, 3, decoded=wrong)


def test_other_activations_are_refused() -> None:
    other = LayerBench(replace(TINY, activation=Activation("situ")), CPU)
    with pytest.raises(MoeUnsupportedError, match="silu alone"):
        GroupedLayer(other.layers[0])


def test_the_host_is_one_more_contender() -> None:
    recorder = make_recorder()
    compare_cpu(recorder, TINY, 2)
    (row,) = recorder.rows
    assert isinstance(row.case, LayerCase)
    assert (row.case.contender, row.case.path) == ("torch on the CPU", "op_by_op")


def test_decoding_to_bfloat16_is_the_one_more_kernel() -> None:
    (key,) = contender_keys(TINY, "sm_90a")
    assert (key.codebook, key.rate, key.out_dtype) == ("mul1", Rate.of(3), "bfloat16")  # type: ignore[attr-defined]  # a DecodeKey
