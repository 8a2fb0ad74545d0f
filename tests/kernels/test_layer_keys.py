"""Holds the keys of whole layers to those that launches ask for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trellis_format.activations import Activation
from trellis_format.rates import Rate
from trellis_kernels import OPS, PackedRoutes, activate, decode, pack_routes, reduce_routes, rotate_input, rotate_output
from trellis_kernels.bench.layers import random_source
from trellis_kernels.cute import compiler
from trellis_kernels.cute.archs import ARCHS, arch_of_device
from trellis_kernels.cute.keys import DecodeKey, KernelKey
from trellis_kernels.cute.op_keys import PackKey, op_keys
from trellis_kernels.layer_keys import OpLayer, layer_keys, op_layer_keys
from trellis_kernels.layers import plan_moe_small, plan_prefill

SILU = Activation("silu")


def op_layer(arch: str = "sm_90a", **changes: Any) -> OpLayer:
    plain: dict[str, Any] = {
        "arch": arch, "codebook": "lut_e4m3", "half_bits": (4, 6), "num_experts": 8, "activation": SILU,
        "x_dtype": "bfloat16", "out_dtype": "float32",
    }  # fmt: skip
    return OpLayer(**plain | changes)


@pytest.mark.parametrize("arch", ARCHS)
def test_keys_of_ops_are_registered_specialisations(arch: str) -> None:
    for law in (SILU, Activation("relu2")):
        for x_dtype in ("float16", "bfloat16", "float32"):
            found = op_layer_keys(op_layer(arch, activation=law, x_dtype=x_dtype), OPS)
            assert len(set(found)) == len(found)
            others = {key for key in found if not isinstance(key, DecodeKey)}
            assert others <= set(op_keys(arch))
            assert {key for key in found if isinstance(key, DecodeKey)} == {
                DecodeKey(arch, "lut_e4m3", half_bits, "float16") for half_bits in (4, 6)
            }


def test_ops_without_kernels_have_no_keys() -> None:
    assert op_layer_keys(op_layer(), ["grouped_gemm"]) == ()
    assert op_layer_keys(op_layer(), []) == ()
    assert op_layer_keys(op_layer(num_experts=5000), ["pack_routes"]) == ()


@pytest.mark.parametrize(("experts", "size"), [(1, 128), (128, 128), (129, 1024), (1024, 1024), (4096, 4096)])
def test_packing_takes_the_smallest_class_of_experts(experts: int, size: int) -> None:
    found = op_layer_keys(op_layer(num_experts=experts), ["pack_routes"])
    assert {key.max_experts for key in found if isinstance(key, PackKey) and key.stage != "offsets"} == {size}
    assert [key.stage for key in found if isinstance(key, PackKey)] == ["all", "count", "place", "offsets"]


def test_fused_layers_name_their_own() -> None:
    source = random_source(experts=8, hidden=256, intermediate=256, codebook="mul1", rates=["3"])
    few = plan_moe_small(source, arch="sm_90a", max_tokens=4, top_k=2, multiprocessors=132)
    many = plan_prefill(source, arch="sm_90a", max_tokens=4096, top_k=2)
    assert layer_keys(few) == (few,)
    assert layer_keys(many) == many.keys


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 300, 3000])
def test_gpu_launches_ask_for_no_other_key(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every op of a layer at few and many rows, aligned and not, over tensors as `OpByOp` passes them."""
    device = torch.device("cuda", torch.cuda.current_device())
    listed = set(op_layer_keys(op_layer(arch_of_device(device.index).name), OPS))
    asked: list[KernelKey] = []
    ready = compiler.ready
    monkeypatch.setattr(compiler, "ready", lambda key: (asked.append(key), ready(key))[1])
    top_k, hidden, width, experts = 2, 256, 384, 8
    routes = tokens * top_k
    ids = torch.randint(0, experts, (tokens, top_k), device=device)
    tables, rows = ids.reshape(-1), torch.arange(routes, device=device) // top_k
    scales = torch.ones(experts, hidden, dtype=torch.float16, device=device)
    middle = torch.ones(experts, width, dtype=torch.float16, device=device)
    for past in (0, 1):
        x = torch.zeros(tokens * hidden + 8, dtype=torch.bfloat16, device=device)[past:][: tokens * hidden]
        rotated = torch.empty(routes, hidden, device=device)
        rotate_input(x.view(tokens, hidden), scales, rows=rows, tables=tables, out=rotated)
    up = torch.zeros(routes, width, device=device)
    activate(up.clone(), up, activation=SILU, out=up)
    rotate_output(up, middle, tables=tables, out=up)
    rotate_input(up, middle, tables=tables, out=up)
    packed = pack_routes(ids, num_experts=experts, block_rows=8)
    assert isinstance(packed, PackedRoutes)
    for past in (0, 1):
        out = torch.empty(tokens * hidden + 8, device=device)[past:][: tokens * hidden].view(tokens, hidden)
        reduce_routes(torch.zeros(routes, hidden, device=device), torch.ones(tokens, top_k, device=device), out=out)
    codes = torch.zeros(16, 24, 48, dtype=torch.int16, device=device)
    decode(codes, codebook="lut_e4m3", rate=Rate(6), out=torch.empty(256, 384, dtype=torch.float16, device=device))
    assert asked
    assert set(asked) <= listed
