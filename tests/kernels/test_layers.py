"""Holds the door to fused layers to its promises on machines with and without a GPU."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys

import pytest
import torch

from trellis_format.activations import Activation
from trellis_kernels import OPS, KernelValueError
from trellis_kernels.bench.layers import random_source
from trellis_kernels.layers import (
    DeviceLimits,
    device_limits,
    launch_scratch,
    op_backends,
    plan_prefill,
    precompile_layer,
    scratch_nbytes,
)
from trellis_kernels.layers import MoeSmallKey as Key

KEY = Key(
    arch="sm_90a",
    codebook="mul1",
    hidden=256,
    padded_hidden=256,
    width=128,
    max_experts=256,
    top_k=2,
    gated=True,
    up_rates=(5,),
    down_rates=(6,),
    activation=Activation("silu"),
)


def test_planning_needs_no_dsl() -> None:
    code = "import sys, trellis_kernels.layers; print([name for name in sys.modules if name.startswith('cutlass')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_scratch_grows_with_tokens() -> None:
    sizes = [scratch_nbytes(KEY, tokens) for tokens in (1, 2, 9)]
    assert sizes == sorted(set(sizes))
    assert sizes[0] > 2 * (256 * 2 + 128 * 2)  # rotated and joined rows of two routes at least


@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_parts_of_scratch_are_all_of_it(tokens: int) -> None:
    parts = launch_scratch(KEY, tokens)
    assert sum(parts.values()) == scratch_nbytes(KEY, tokens)
    assert next(iter(parts)) == "header"
    assert all(parts.values())
    source = random_source(experts=3, hidden=256, intermediate=128, codebook="mul1", rates=["2.5"])
    plan = plan_prefill(source, arch="sm_90a", max_tokens=tokens, top_k=2)
    assert sum(launch_scratch(plan, tokens).values()) == plan.scratch_nbytes
    assert launch_scratch(plan, tokens).keys() == plan.scratch_parts.keys()


@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl")
def test_a_layer_compiles_without_a_gpu() -> None:
    precompile_layer(KEY)


def test_limits_name_a_known_target() -> None:
    assert device_limits("cpu") is None
    if torch.cuda.is_available():
        limits = device_limits("cuda")
        assert limits is not None
        assert limits.multiprocessors == torch.cuda.get_device_properties(0).multi_processor_count
    else:
        assert device_limits("cuda") is None
    assert DeviceLimits("sm_90a", 132) == eval(repr(DeviceLimits("sm_90a", 132)))


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(KernelValueError, match="sm_1"):
        dataclasses.replace(KEY, arch="sm_1")


def test_ops_without_limits_run_in_torch() -> None:
    assert {backend for _, backend in op_backends(None)} == {"cpu"}
    backends = op_backends(DeviceLimits("sm_90a", 132))
    assert [op for op, _ in backends] == list(OPS)
    assert dict(backends)["decode"] == "cute"


def test_routes_of_more_experts_than_kernels_count_are_packed_in_torch() -> None:
    limits = DeviceLimits("sm_90a", 132)
    assert op_backends(limits, 4096) == op_backends(limits)
    plain, many = dict(op_backends(limits)), dict(op_backends(limits, 4097))
    assert (plain["pack_routes"], many["pack_routes"]) == ("cute", "cpu")
    assert many | {"pack_routes": "cute"} == plain
