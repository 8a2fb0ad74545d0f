"""Holds the planner of the few-token kernels to its promises: from numbers alone, and legal everywhere."""

from __future__ import annotations

import itertools

import pytest

from trellis_format.activations import Activation
from trellis_format.errors import FormatValueError
from trellis_format.extent import TrellisExtent
from trellis_kernels.bench.layers import random_source
from trellis_kernels.cute.moe_key import MoeSmallKey, scratch_nbytes
from trellis_kernels.cute.moe_plan import plan_moe_small
from trellis_kernels.errors import KernelUnsupportedError


def plan(source=None, **changes) -> MoeSmallKey:
    settings = {"arch": "sm_90a", "max_tokens": 8, "top_k": 2, "multiprocessors": 132}
    return plan_moe_small(source or make_source(), **(settings | changes))


def make_source(**changes):
    settings = {"experts": 6, "hidden": 320, "intermediate": 700, "codebook": "mul1", "rates": ["3", "4", "2.5", "6"]}
    return random_source(**(settings | changes))


def test_fields_come_from_the_layer() -> None:
    key = plan(make_source(biased=True, shared=True, joint=True), x_dtype="bfloat16", out_dtype="float32", id_bytes=4)
    assert (key.hidden, key.padded_hidden, key.width, key.max_experts) == (320, 384, 768, 256)
    # rates are taken in turn over 18 linears: gate, up, down of each expert
    table = [["3", "4", "2.5", "6"][index % 4] for index in range(18)]
    halves = [int(float(rate) * 2) for rate in table]
    assert key.up_rates == tuple(sorted({half for index, half in enumerate(halves) if index % 3 < 2}))
    assert key.down_rates == tuple(sorted(set(halves[2::3])))
    assert key.biased == (True, True, True)
    assert key.shared_inputs
    assert key.joint_inputs
    assert key.shared_outputs
    assert (key.x_dtype, key.out_dtype, key.weight_dtype, key.id_bytes) == ("bfloat16", "float32", "float32", 4)


def test_only_the_share_that_begins_the_axis_adds_the_down_bias() -> None:
    source = make_source(biased=True)
    shares = [
        TrellisExtent(global_intermediate_size=768, first_slot=first, slot_count=count)
        for first, count in ((0, 4), (4, 20))
    ]
    keys = [plan(source, extent=share) for share in shares]
    assert [key.width for key in keys] == [128, 640]
    assert [key.biased for key in keys] == [(True, True, True), (True, True, False)]


def test_activation_is_the_layers_unless_given() -> None:
    assert plan().activation == Activation("silu")
    assert plan(activation=Activation("situ")).activation == Activation("situ")
    gateless = plan(make_source(activation=Activation("relu2")))
    assert not gateless.gated


def test_arithmetic_is_exact_unless_asked() -> None:
    assert plan().arithmetic == "exact"
    assert plan(arithmetic="bytes").arithmetic == "bytes"
    with pytest.raises(KernelUnsupportedError, match="needs codebook mul1"):
        plan(make_source(codebook="mcg", rates=["3"]), arithmetic="bytes")
    with pytest.raises(FormatValueError, match="mcg"):
        make_source(codebook="mcg")  # half rates are of mul1 alone


@pytest.mark.parametrize("experts", [1, 8, 896])
def test_every_width_and_capacity_has_a_legal_key(experts: int) -> None:
    keys = set()
    widths = (128, 256, 384, 768, 1408, 7168)
    for hidden, intermediate, tokens in itertools.product(widths, widths, (1, 2, 7, 64, 128)):
        source = make_source(experts=experts, hidden=hidden, intermediate=intermediate, rates=["3"])
        top_k = min(8, experts)
        key = plan(source, max_tokens=tokens, top_k=top_k)
        steps = key.padded_hidden // 64, key.width // 64
        assert key.up.split <= steps[0]
        assert key.down.split <= steps[1]
        assert scratch_nbytes(key, tokens) > tokens * top_k * key.padded_hidden * 4
        assert plan(source, max_tokens=tokens, top_k=top_k) == key
        keys.add((key.up, key.down, key.row_columns))
    assert len(keys) > 2


def test_more_rows_share_a_decoded_weight() -> None:
    rows = [plan(max_tokens=tokens).group_rows for tokens in (1, 8, 64)]
    assert rows == sorted(rows)
    assert rows[-1] == 16
    assert plan(max_tokens=1, arithmetic="bytes").group_rows == 4
