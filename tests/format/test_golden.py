"""Holds the decode and the float64 reference to what the peer's kernels gave."""

from __future__ import annotations

import numpy as np
from data_set import InnerCase, LinearCase, MoeCase, StatesCase, sha256

from trellis_format.checkpoint import open_checkpoint
from trellis_format.codebooks import get_codebook
from trellis_format.exl3.adapter import trellis_from_exl3
from trellis_format.exl3.layers import find_layer
from trellis_format.rates import Rate
from trellis_format.reference import linear, moe_forward
from trellis_format.ring import unpack_states
from trellis_format.tiles import decode_inner

LINEAR_BOUND = 1e-3
MOE_BOUND = 2e-3
FLOAT64_BOUND = 1e-6


def distance(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def test_decode_is_bit_exact(inner_case: InnerCase) -> None:
    weight = decode_inner(inner_case.trellis, get_codebook(inner_case.codebook), Rate.of(inner_case.bits))
    assert weight.dtype == np.float16
    assert sha256(weight) == inner_case.weight_sha256


def test_states_are_bit_exact(states_case: StatesCase) -> None:
    assert sha256(unpack_states(states_case.trellis, Rate.of(states_case.bits))) == states_case.states_sha256


def test_linear_matches_the_peer(linear_case: LinearCase) -> None:
    case = linear_case
    y = linear(case.x, case.trellis, case.suh, case.svh, case.codebook, Rate.of(case.bits))
    assert distance(y, case.y.astype(np.float64)) < LINEAR_BOUND


def test_experts_match_the_peer(moe_case: MoeCase) -> None:
    with open_checkpoint(moe_case.checkpoint) as checkpoint:
        source, weights = trellis_from_exl3(find_layer(checkpoint, moe_case.layer))
        y = moe_forward(source, weights, moe_case.x, moe_case.topk_ids, moe_case.topk_weights)
    assert moe_case.y is not None or moe_case.y_float64 is not None
    if moe_case.y is not None:
        assert distance(y, moe_case.y.astype(np.float64)) < MOE_BOUND
    if moe_case.y_float64 is not None:
        assert distance(y, moe_case.y_float64) < FLOAT64_BOUND
