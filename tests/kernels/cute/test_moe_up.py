"""Holds what lies between the GEMMs of a row to float64, lane by lane in numpy, for every kind of layer."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from trellis_format.activations import Activation
from trellis_format.hadamard import hadamard
from trellis_kernels.cute.moe_key import MoeSmallKey, Tiling

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from trellis_kernels.cute import moe_bytes, moe_math, moe_middle, moe_up

LANE = np.arange(32)
EXPERT, SLOT, ROUTE, BLOCK = 3, 5, 9, 1
WIDTH, HIDDEN = 256, 128
TABLES, GATE_BIAS, UP_BIAS, SLOTS, LAWS, JOINED = (1 << shift for shift in (32, 33, 34, 35, 36, 37))


def make_key(activation: Activation, biased: bool, arithmetic: str) -> MoeSmallKey:
    gated = activation.gated
    return MoeSmallKey(
        arch="sm_90a",
        codebook="mul1",
        hidden=HIDDEN,
        padded_hidden=HIDDEN,
        width=WIDTH,
        max_experts=256,
        top_k=2,
        gated=gated,
        up_rates=(6,),
        down_rates=(6,),
        activation=activation,
        biased=(biased and gated, biased, biased),
        arithmetic=arithmetic,
    )


@pytest.mark.parametrize("arithmetic", ["exact", "bytes"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("law", [Activation("silu"), Activation("relu2")], ids=lambda law: law.kind)
def test_finish_is_rotation_scales_bias_activation_and_rotation(
    monkeypatch, law, biased: bool, arithmetic: str
) -> None:
    key = make_key(law, biased, arithmetic)
    rng = np.random.default_rng(0)
    count = key.projections
    memory = {
        TABLES: rng.standard_normal(4 * (count + 1) * WIDTH),
        GATE_BIAS: rng.standard_normal(4 * WIDTH),
        UP_BIAS: rng.standard_normal(4 * WIDTH),
    }
    row_laws = rng.standard_normal((20, 2))
    stored: dict[int, np.ndarray] = {}

    def load_scales(table: int, element: np.ndarray) -> list[np.ndarray]:
        return [memory[table][element + index] for index in range(4)]

    def load_ints(address: int, count: int) -> list[int]:
        assert (address, count) == (SLOTS + SLOT * moe_up.SLOT_BYTES, 1)
        return [ROUTE]

    def load_floats(address: int, count: int, bypass_l1: bool) -> list[float]:
        return list(row_laws[(address - LAWS) // moe_bytes.LAW_BYTES])

    def store_words(address: np.ndarray, words: list[tuple[np.ndarray, np.ndarray]]) -> None:
        stored.update(zip(address.tolist(), np.stack(words[0], axis=1), strict=True))

    gpu = SimpleNamespace(
        fma=lambda a, b, c: a * b + c,
        lane_swap=lambda value, mask: value[LANE ^ mask],
        exp2=np.exp2,
        reciprocal=lambda value: 1.0 / value,
        clamp_below=np.maximum,
        load_ints=load_ints,
        load_floats=load_floats,
        pack_halves=lambda low, high: (low, high),
        store_words=lambda address, words: stored.update(
            zip(address.tolist(), np.stack(words[0], axis=1), strict=True)
        ),
    )
    for module in (moe_math, moe_bytes, moe_middle, moe_up):
        monkeypatch.setattr(module, "gpu", gpu)
        monkeypatch.setattr(module, "Float32", np.float64, raising=False)
        monkeypatch.setattr(module, "Int64", np.int64, raising=False)
    monkeypatch.setattr(moe_math, "load_scales", load_scales)
    sums = rng.standard_normal((count, 128))
    part = SimpleNamespace(slots=SLOTS, rotated_laws=LAWS, joined=JOINED)
    args = SimpleNamespace(middle_scales=TABLES, gate_bias=GATE_BIAS, up_bias=UP_BIAS)
    moe_up._finish(args, [list(row.reshape(32, 4).T) for row in sums], part, EXPERT, SLOT, BLOCK, LANE, key)

    own = slice(BLOCK * 128, BLOCK * 128 + 128)
    scales = memory[TABLES].reshape(4, count + 1, WIDTH)[EXPERT, :, own]
    branches = []
    for projection, row in enumerate(sums):
        if arithmetic == "bytes":
            scale, shift = row_laws[ROUTE * key.rotated_inputs + projection % key.rotated_inputs]
            row = (row + shift) * scale
        values = hadamard(row) * scales[projection]
        if biased:
            bias = (GATE_BIAS, UP_BIAS)[projection + 2 - count]
            values = values + memory[bias].reshape(4, WIDTH)[EXPERT, own]
        branches.append(values)
    joined = law.apply(branches[0] if law.gated else None, branches[-1])
    wanted = hadamard(joined * scales[-1])
    first = JOINED + SLOT * 2 * WIDTH + BLOCK * 256
    assert sorted(stored) == list(range(first, first + 256, 4))
    found = np.concatenate([stored[address] for address in sorted(stored)])
    order = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    np.testing.assert_allclose(found, wanted.reshape(8, 16)[:, order].reshape(-1), rtol=1e-10, atol=1e-12)


def test_ready_count_is_the_thread_blocks_of_a_group() -> None:
    key = make_key(Activation("silu"), False, "exact")
    assert moe_up.ready_count(key) == 2
    wide = MoeSmallKey(**{**key.__dict__, "up": Tiling(blocks=2)})
    assert moe_up.ready_count(wide) == 1
