"""Holds the arithmetic between the GEMMs to the float64 laws: lane by lane in numpy, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from trellis_format.activations import Activation
from trellis_format.codebooks import get_codebook
from trellis_format.codebooks.mul1 import BYTE_BASE
from trellis_format.hadamard import hadamard

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from trellis_kernels.cute import moe_bytes, moe_math

LANE = np.arange(32)
STORED = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
LAWS = (
    Activation("silu"),
    Activation("silu", limit=0.75),
    Activation("gelu_tanh"),
    Activation("situ"),
    Activation("swigluoai", limit=1.5, alpha=1.702, beta=1.0),
    Activation("relu2"),
)


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers are arrays of 32 lanes in float64."""
    gpu = SimpleNamespace(
        fma=lambda a, b, c: a * b + c,
        lane_swap=lambda value, mask: value[LANE ^ mask],
        exp2=np.exp2,
        reciprocal=lambda value: 1.0 / value,
        clamp_above=np.minimum,
        clamp_below=np.maximum,
        load_floats=lambda law, count, bypass_l1: list(law),
    )
    for module in (moe_math, moe_bytes):
        monkeypatch.setattr(module, "gpu", gpu)
        monkeypatch.setattr(module, "Float32", np.float64, raising=False)


def spread(row: np.ndarray) -> list[np.ndarray]:
    """A block of 128 channels to four registers of 32 lanes."""
    return list(row.reshape(32, 4).T)


def joined(registers: list[np.ndarray]) -> np.ndarray:
    """The reverse."""
    return np.stack(registers, axis=1).reshape(128)


@pytest.mark.usefixtures("lanes")
def test_hadamard_of_a_warp_is_the_block() -> None:
    row = np.random.default_rng(0).standard_normal(128)
    found = joined(moe_math.hadamard(spread(row), moe_math.hadamard_signs(LANE)))
    np.testing.assert_allclose(found, hadamard(row), rtol=1e-13, atol=1e-13)


@pytest.mark.usefixtures("lanes")
@pytest.mark.parametrize("law", LAWS, ids=lambda law: f"{law.kind}-{law.limit:g}")
def test_activations_are_the_laws(law: Activation) -> None:
    rng = np.random.default_rng(1)
    gate, up = rng.standard_normal((2, 128)) * 6
    found = moe_math.activate(spread(gate) if law.gated else None, spread(up), law)
    np.testing.assert_allclose(joined(found), law.apply(gate if law.gated else None, up), rtol=1e-11, atol=1e-12)


@pytest.mark.usefixtures("lanes")
def test_extremes_stay_finite() -> None:
    far = np.array([-1e4, -90.0, 90.0, 1e4] * 32)
    with np.errstate(over="ignore"):
        for law in LAWS:
            found = moe_math.activate(spread(far) if law.gated else None, spread(np.ones(128)), law)
            assert np.isfinite(joined(found)).all()


def test_stored_order_is_what_products_read() -> None:
    first = moe_math.stored_offset(LANE)
    place = np.empty(128, int)  # of each channel, in fp16 values
    for index in range(4):
        place[4 * LANE + index] = (first + 8 * (index // 2)) // 2 + index % 2
    assert sorted(place) == list(range(128))
    channel_at = np.argsort(place)
    np.testing.assert_array_equal(channel_at.reshape(8, 16) - 16 * np.arange(8)[:, None], np.tile(STORED, (8, 1)))
    # bytes of hi lie in the same order, those of lo 16 further on
    byte = moe_bytes.stored_byte_offset(LANE)
    for index in range(4):
        channel = 4 * LANE + index
        found = byte + 4 * (index // 2) + index % 2
        np.testing.assert_array_equal(found, place[channel] // 16 * 32 + place[channel] % 16)


def test_byte_law_is_the_codebook_before_rounding() -> None:
    codebook = get_codebook("mul1")
    states = np.arange(65536, dtype=np.uint64)
    hashes = (states * np.uint64(codebook.multiplier)) & np.uint64(0xFFFFFFFF)
    sums = sum(((hashes >> np.uint64(8 * byte)) & np.uint64(255)).astype(np.float64) for byte in range(4))
    weights = moe_bytes.weight_scale() * (sums + moe_bytes.weight_offset())
    table = codebook.table.astype(np.float64)
    assert np.abs(weights - table).max() < 1.001 * 2**-10  # half a unit of fp16 between 2 and 4
    assert np.linalg.norm(weights - table) / np.linalg.norm(table) < 2.5e-4
    assert BYTE_BASE == 0x6400  # fp16 1024, to which the law adds S


@pytest.mark.usefixtures("lanes")
def test_law_of_a_row_undoes_the_quantisation() -> None:
    rng = np.random.default_rng(2)
    sums, row = rng.integers(0, 1021, (256, 4)).astype(np.float64), rng.standard_normal(256)
    step = moe_bytes._TINIEST + np.abs(row).max() / (127 * 256 + 127)
    whole = np.rint(row / step)
    law = (step * moe_bytes.weight_scale(), whole.sum() * moe_bytes.weight_offset())
    found = moe_bytes.apply_law(list(whole @ sums), law)
    wanted = (whole * step) @ (moe_bytes.weight_scale() * (sums + moe_bytes.weight_offset()))
    np.testing.assert_allclose(found, wanted, rtol=1e-10)


def test_two_signed_bytes_hold_every_activation() -> None:
    whole = np.arange(-32639, 32640)
    high = np.array(moe_bytes.high_bytes([whole]))[0]
    low = whole - 256 * high
    assert -128 <= high.min() <= high.max() <= 127
    assert -128 <= low.min() <= low.max() <= 127
    np.testing.assert_array_equal(low.astype(np.int8), whole.astype(np.int8))
