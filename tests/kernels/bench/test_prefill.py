"""Holds the timing of many tokens to its plans and names anywhere, and to a checked row on a GPU."""

from __future__ import annotations

import json

import pytest

from trellis_kernels.bench.moe_small import GEOMETRIES, Geometry
from trellis_kernels.bench.prefill import kernel_part, main, make_plan

MIB = 1 << 20


@pytest.mark.parametrize("name", ["glm", "qwen", "qwen4", "dsv3"])
def test_plans_are_those_of_the_geometry(name: str) -> None:
    geometry = GEOMETRIES[name]
    plan = make_plan(geometry, 1024, joint=True, bound=256 * MIB)
    assert (plan.hidden, plan.width, plan.num_experts) == (geometry.hidden, geometry.intermediate, geometry.experts)
    assert (plan.top_k, plan.codebook, plan.images) == (geometry.top_k, geometry.codebook, 1)
    assert plan.scratch_nbytes <= 256 * MIB
    assert make_plan(geometry, 1024).images == 2
    assert make_plan(geometry, 16384).engines[-1] == "wgmma_tall"
    assert make_plan(geometry, 16384, engine="mma").engines == ("mma",)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("kernel_cutlass__gemm_kernel__prefill_gemmsm_90amul1K33joinsiluimages2float32_0", "gate_up"),
        ("kernel_cutlass__gemm_kernel__prefill_gemmsm_90amul1K3downfloat16_0", "down"),
        ("kernel_cutlass__gemm_kernel__prefill_shortsm_90amul1K3downfloat16_0", "down"),
        ("kernel_cutlass__image_kernel__prefill_imagesm_90afloat16images2_0", "image"),
        ("kernel_cutlass__reduce_kernel__prefill_reducesm_90afloat32float16_0", "sum"),
        ("void at::native::vectorized_elementwise_kernel", None),
    ],
)
def test_kernels_are_told_apart_by_name(name: str, part: str | None) -> None:
    assert kernel_part(name) == part


@pytest.mark.gpu
def test_a_row_is_checked_against_float64(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    monkeypatch.setitem(GEOMETRIES, "small", Geometry(256, 256, 4, 2, "mul1", "3"))
    main(["--geometry", "small", "--tokens", "40"])
    row = json.loads(capsys.readouterr().out)
    assert row["error"] < 1e-3
    assert row["ms"] > 0
    assert {"image", "gate_up", "down", "sum"} <= set(row["kernels_ms"])
