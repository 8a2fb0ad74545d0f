"""Holds the search for tilings to candidates that can be compiled and launched."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trellis_kernels.bench.layers import random_source
from trellis_kernels.bench.moe_small import GEOMETRIES
from trellis_kernels.bench.tune import pairs
from trellis_kernels.cute.moe_key import MoeSmallKey
from trellis_kernels.cute.moe_plan import plan_moe_small

SHARED_BYTES = 227 * 1024  # of a thread block, sm_90


def planned(name: str, tokens: int) -> MoeSmallKey:
    geometry = GEOMETRIES[name]
    source = random_source(
        experts=geometry.experts,
        hidden=geometry.hidden,
        intermediate=geometry.intermediate,
        codebook=geometry.codebook,
        rates=[geometry.rate],
    )
    return plan_moe_small(source, arch="sm_90a", max_tokens=tokens, top_k=geometry.top_k, multiprocessors=132)


@pytest.mark.parametrize("tokens", [1, 8, 32, 128])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_pairs_are_legal_and_distinct(name: str, tokens: int) -> None:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    from trellis_kernels.cute.moe_down import down_shared_bytes
    from trellis_kernels.cute.moe_up import up_shared_bytes

    key = planned(name, tokens)
    found = pairs(key, GEOMETRIES[name].experts, tokens, 132)
    assert len(set(found)) == len(found) > 4
    for up, down in found:
        candidate = replace(key, up=up, down=down)
        assert up_shared_bytes(candidate) <= SHARED_BYTES
        assert down_shared_bytes(candidate) <= SHARED_BYTES
        for gemm, tiling in (("up", up), ("down", down)):
            assert tiling.resident * candidate.threads(gemm) <= 2048
        assert key.padded_hidden // 64 // (up.split * up.slices) >= 1
        assert key.width // 64 >= down.split
