"""Holds ceilings to the work that they count, and to kernels that exist."""

from __future__ import annotations

import pytest
import torch

from trellis_kernels.bench import ops
from trellis_kernels.bench.ops import OpRow
from trellis_kernels.bench.timing import Samples
from trellis_moe.bench import ceilings
from trellis_moe.bench.ceilings import ceiling_keys, measure_copy, measure_decode, measure_gemm
from trellis_moe.bench.record import COPY, GEMM, Recorder, decode_ceiling


def recorder_on(device: str) -> Recorder:
    return Recorder(torch.device(device), seconds=60.0, samples=5, tell=lambda line: None)


def test_copy_and_product_count_what_they_do() -> None:
    recorder = recorder_on("cpu")
    measure_copy(recorder)
    measure_gemm(recorder)
    found = recorder._ceilings
    assert found[COPY].work == 2 << 20
    assert found[GEMM].work == 2 * 128**3
    assert all(len(ceiling.samples_ns) == 5 for ceiling in found.values())


def test_a_copy_that_is_off_is_no_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = OpRow("copy", "1 MiB", Samples((1,) * 5), 2, 0, error=0.5)
    monkeypatch.setattr(ceilings, "copy_row", lambda *_, **__: wrong)
    recorder = recorder_on("cpu")
    with pytest.raises(RuntimeError, match=r"off by 0\.5"):
        measure_copy(recorder)
    assert recorder._ceilings == {}


def test_a_product_that_is_off_is_no_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "mm", lambda a, b, *, out: out.fill_(1.0))
    with pytest.raises(RuntimeError, match="product is off"):
        measure_gemm(recorder_on("cpu"))


def test_decoding_counts_weights_from_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []

    def rows(device: torch.device, **options: object):
        asked.append(options)
        yield OpRow("ceiling", "mcg K=3 from registers", Samples((1000,) * 5), 0, 6_000_000)

    monkeypatch.setattr(ceilings, "ceiling_rows", rows)
    recorder = recorder_on("cpu")
    measure_decode(recorder, "mcg", "3")
    assert recorder._ceilings[decode_ceiling("mcg", "3")].rate == 6e12
    assert asked == [{"codebooks": ["mcg"], "rates": ["3"], "sources": (False,), "count": 5}]


def test_keys_are_of_legal_rates() -> None:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    pairs = [(book, k) for book in ops.CEILING_CODEBOOKS for k in ("2", "2.5")]
    keys = ceiling_keys(pairs, "sm_90a")
    assert [str(key) for key in keys] == [
        "ceiling sm_90a 3inst K=2 registers", "ceiling sm_90a mcg K=2 registers",
        "ceiling sm_90a mul1 K=2 registers", "ceiling sm_90a mul1 K=2.5 registers",
    ]  # fmt: skip


@pytest.mark.gpu
def test_gpu_ceilings_are_below_what_the_silicon_can() -> None:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    recorder = recorder_on("cuda")
    measure_copy(recorder)
    measure_gemm(recorder)
    measure_decode(recorder, "mul1", "4")
    rates = {name: ceiling.rate for name, ceiling in recorder._ceilings.items()}
    assert 1e11 < rates[COPY] < 2e13
    assert 1e13 < rates[GEMM] < 5e15
    assert 1e11 < rates[decode_ceiling("mul1", "4")] < 1e14
