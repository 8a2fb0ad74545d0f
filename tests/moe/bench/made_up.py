"""Owns a run of a suite in which nothing is measured: true cases with times that are made up.  It must not assert."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from receipt_samples import COMMIT, STATE
from trellis_format.codebooks import get_codebook
from trellis_format.rates import Rate
from trellis_kernels.bench.op_cases import OpSizes, cases
from trellis_kernels.bench.timing import Samples
from trellis_kernels.layers import DeviceLimits
from trellis_moe.bench import suite as module
from trellis_moe.bench.contenders import DECODED
from trellis_moe.bench.layers import plan_layer
from trellis_moe.bench.machine import Commit
from trellis_moe.bench.prepare import Preparation
from trellis_moe.bench.presets import Preset
from trellis_moe.bench.record import COPY, GEMM, Recorder, decode_ceiling, pinned_copy
from trellis_moe.bench.suite import Suite, run
from trellis_moe.receipts.figures import KIMI_LAYERS, UNQUANTISED
from trellis_moe.receipts.schema import Check, LayerCase, Machine, Memory, OpCase, PrepareCase, Receipt

LIMITS = DeviceLimits("sm_90a", 132)
H200 = Machine(
    kind="cuda", name="NVIDIA H200", count=1, driver="580.1", multiprocessors=132, start=(STATE,), end=(STATE,)
)
EXACT = Check(reference="made up", error=0.0, bound=0.0)


def _times(median: float) -> Samples:
    """Twelve around a median, as a run has them."""
    return Samples(tuple(round(median * (1 + 0.003 * ((7 * index) % 12 - 6))) for index in range(12)))


class _Layers:
    """In the place of `LayerBench`: plans as it does, and takes a microsecond a token and a rate."""

    def __init__(self, preset: Preset, _device: torch.device) -> None:
        self.preset, self.layers = preset, (preset,)

    def add(self, recorder: Recorder, tokens: int, mode: Any, contender: str = "trellis", **options: Any) -> None:
        preset = self.preset
        arithmetic = options.get("arithmetic", "exact")
        plan = plan_layer(preset, tokens, device=torch.device("cuda"), limits=LIMITS, **options)
        variant = plan.variant_for(tokens)
        if variant.arithmetic != arithmetic:
            recorder.skip(f"{preset.key}, {tokens} tokens, {arithmetic}", f"takes {variant.arithmetic}")
            return
        case = LayerCase(
            geometry=preset.name, experts=preset.experts, hidden=preset.hidden, intermediate=preset.intermediate,
            top_k=preset.top_k, codebook=preset.codebook, k=preset.k, tokens=tokens,
            io_dtype=options.get("io_dtype", "float16"), contender=contender, arithmetic=variant.arithmetic,
            path=variant.path, mode=mode,
        )  # fmt: skip
        weights = preset.weights_per_expert
        scratch = plan.required_nbytes()
        recorder.add_row(
            case, _times(20_000 + 600 * tokens * float(preset.k)), nbytes=weights, flops=2 * weights * tokens,
            weights=weights, check=EXACT, memory=Memory(planned_bytes=scratch, final_bytes=scratch),
        )  # fmt: skip

    def measure(self, recorder: Recorder, tokens: int, *, eager: bool, **options: Any) -> None:
        for mode in ("graph", "eager") if eager else ("graph",):
            self.add(recorder, tokens, mode, **options)


def _compare(recorder: Recorder, bench: _Layers, tokens: int, *, decoded: object) -> None:
    for name in ("trellis", UNQUANTISED, DECODED):
        bench.add(recorder, tokens, "graph", name)


def _on_cpu(recorder: Recorder, preset: Preset, tokens: int) -> None:
    _Layers(preset, torch.device("cpu")).add(recorder, tokens, "eager", "torch on the CPU")


def _ops(recorder: Recorder, group: str, sizes: OpSizes) -> None:
    """The true cases, on tensors that have no memory."""
    for case in cases(group, sizes, torch.device("meta")):
        what = OpCase(op=case.op, case=case.case, mode="graph")
        times = _times(case.moved_bytes / 3500 + 3000)
        recorder.add_row(what, times, nbytes=case.moved_bytes, flops=0, weights=case.weights, check=EXACT)


def _prepare(recorder: Recorder, preparation: Preparation) -> None:
    runs = [(preparation.name, 1, bound) for bound in preparation.bounds]
    for name, layers, bound in [*runs, *([preparation.layers] if preparation.layers else [])]:
        nbytes = KIMI_LAYERS.get(name, 1 << 30)
        recorder.add_ceiling(pinned_copy(name, bound), "bytes", nbytes, _times(nbytes / 50))
        recorder.add_row(
            PrepareCase(layer=name, layers=layers, bound_bytes=bound, code_bytes=nbytes), _times(nbytes / 40),
            nbytes=nbytes, flops=0, weights=0, check=EXACT,
            memory=Memory(
                planned_bytes=nbytes, final_bytes=nbytes, bound_bytes=bound, peak_host_bytes=bound,
                peak_device_bytes=bound,
            ),
        )  # fmt: skip


def _decode(recorder: Recorder, codebook: str, k: str) -> None:
    if Rate.of(k) in get_codebook(codebook).legal_rates:
        recorder.add_ceiling(decode_ceiling(codebook, k), "weights", 1 << 30, _times(2e8))


def made_up_receipt(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> Receipt:
    """The receipt of a full run on an H200 that was never there."""
    for name, stand_in in {
        "measure_copy": lambda recorder: recorder.add_ceiling(COPY, "bytes", 2 << 30, _times(5e5)),
        "measure_gemm": lambda recorder: recorder.add_ceiling(GEMM, "flops", 1 << 40, _times(1.4e6)),
        "measure_decode": _decode, "LayerBench": _Layers, "GroupedLayer": lambda layer: layer, "compare": _compare,
        "compare_cpu": _on_cpu, "measure_ops": _ops, "measure_layer_preparations": _prepare,
    }.items():  # fmt: skip
        monkeypatch.setattr(module, name, stand_in)
    recorder = Recorder(torch.device("cpu"), seconds=600.0, samples=12, tell=lambda line: None)
    run(recorder, replace(suite, sizes_on_cpu=False))
    receipt = recorder.receipt("trellis-moe bench all --out DIR", Commit(COMMIT, dirty=False))
    versions = receipt.versions.model_copy(update={"cuda": "13.0", "dsl": "4.8.1"})
    return Receipt.model_validate(
        receipt.model_copy(update={"machine": H200, "versions": versions}).model_dump(by_alias=True)
    )
