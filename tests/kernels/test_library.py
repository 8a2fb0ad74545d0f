"""Holds the custom ops to torch's own checks, to the ops that they stand for, and to whole graphs of torch.compile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kernel_cases import as_bits, poisoned, random_bank, random_codes
from trellis_format.activations import Activation
from trellis_format.rates import Rate
from trellis_kernels import OPS, ops
from trellis_kernels.library import CUSTOM_OPS

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
IDS = torch.tensor([[0, 1], [1, -1], [1, 0]], dtype=torch.int32)
LAW = Activation("swigluoai", limit=0.5, alpha=1.5, beta=1.0)


def cases(device: str) -> dict[str, tuple[tuple[Any, ...], Any]]:
    """Arguments of each custom op, and the call of the op that it stands for."""
    torch.manual_seed(3)
    rows, scales = torch.randn(6, 128, device=device), torch.randn(2, 128, device=device).half()
    tables = torch.tensor([0, 1, -1, 0, 1, 5], device=device)
    codes = torch.from_numpy(random_codes(1, 2, rate=Rate.of(2.5))).to(device)
    ids, mapped = IDS.to(device), torch.tensor([1, 0], dtype=torch.int32, device=device)
    bank, _ = random_bank("mcg", [Rate.of(2), Rate.of(5)], 128, 128)
    bank = type(bank)("mcg", 128, 128, bank.words.to(device), bank.descriptors.to(device), bank.places)
    packed = ops.pack_routes(ids, num_experts=2, block_rows=8)
    weights, halves = torch.rand(3, 2, device=device), rows.half()
    names = ("route_indices", "block_experts", "packed_count", "expert_offsets", "expert_counts")
    tensors = [getattr(packed, name) for name in names]
    flat = [number for place in bank.places for number in place]
    accumulator = torch.zeros(3, 128, device=device)
    return {
        "decode": (
            (codes, "mul1", 5, poisoned(16, 32, device=device)),
            lambda out: ops.decode(codes, codebook="mul1", rate=Rate.of(2.5), out=out),
        ),
        "rotate_input": (
            (rows, scales, tables, tables, 128, poisoned(6, 128, device=device)),
            lambda out: ops.rotate_input(rows, scales, rows=tables, tables=tables, out=out),
        ),
        "rotate_output": (
            (rows, scales, tables, scales, 128, poisoned(6, 128, device=device)),
            lambda out: ops.rotate_output(rows, scales, tables=tables, bias=scales, out=out),
        ),
        "activate": (
            (rows, rows.flip(0), "swigluoai", 0.5, 1.5, 1.0, poisoned(6, 128, device=device)),
            lambda out: ops.activate(rows, rows.flip(0), activation=LAW, out=out),
        ),
        "pack_routes": (
            (ids, 2, 16, mapped, True),
            lambda: ops.pack_routes(ids, num_experts=2, block_rows=16, expert_map=mapped),
        ),
        "grouped_gemm": (
            (halves, bank.words, bank.descriptors, flat, "mcg", 8, *tensors, poisoned(6, 128, device=device)),
            lambda out: ops.grouped_gemm(halves, bank, packed, out=out),
        ),
        "reduce_routes": (
            (rows, weights, 128.0, accumulator, poisoned(3, 100, dtype=torch.bfloat16, device=device)),
            lambda out: ops.reduce_routes(rows, weights, factor=128.0, accumulator=accumulator, out=out),
        ),
    }


def bits_of(result: Any) -> list[list[int]]:
    """Bits of a result's tensors."""
    if isinstance(result, torch.Tensor):
        result = (result,)
    if not isinstance(result, tuple):
        result = [value for value in vars(result).values() if isinstance(value, torch.Tensor)]
    return [as_bits(tensor).tolist() for tensor in result]


def test_every_op_has_a_custom_op() -> None:
    assert set(CUSTOM_OPS) == set(OPS)
    assert all(hasattr(torch.ops.trellis, name) for name in OPS)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPS)
def test_torch_accepts_the_op(name: str, device: str) -> None:
    arguments, _ = cases(device)[name]
    torch.library.opcheck(CUSTOM_OPS[name], arguments)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPS)
def test_a_whole_graph_gives_the_ops_bits(name: str, device: str) -> None:
    arguments, direct = cases(device)[name]
    operation = getattr(torch.ops.trellis, name)
    torch._dynamo.reset()
    if name == "pack_routes":
        compiled = torch.compile(lambda *given: operation(*given), fullgraph=True, backend="aot_eager")
        assert bits_of(compiled(*arguments)) == bits_of(direct())
        return
    out = arguments[-1]

    def step(*given: Any) -> torch.Tensor:
        operation(*given)
        return given[-1] * 1.0

    found = torch.compile(step, fullgraph=True, backend="aot_eager")(*arguments)
    wanted = direct(poisoned(*out.shape, dtype=out.dtype, device=device))
    assert bits_of(out) == bits_of(wanted)
    assert bits_of(found) == bits_of(wanted)


def test_shapes_of_a_graph_may_vary() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda ids: torch.ops.trellis.pack_routes(ids, 4, 8, None, True),
        fullgraph=True,
        backend="aot_eager",
        dynamic=True,
    )
    for tokens in (3, 9, 20):
        ids = torch.from_numpy(np.random.default_rng(tokens).integers(-1, 5, (tokens, 3)))
        assert bits_of(compiled(ids)) == bits_of(ops.pack_routes(ids, num_experts=4, block_rows=8))
