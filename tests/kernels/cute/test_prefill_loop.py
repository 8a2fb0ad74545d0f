"""Holds the decoding of the many-row loop to the tile law, lane by lane in numpy."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.cute.conftest import SHARED_BASE, table_words
from trellis_format.codebooks import CODEBOOKS, get_codebook
from trellis_format.rates import Rate
from trellis_format.tiles import decode_inner
from trellis_kernels.cute.prefill_share import (
    BLOCK_CHANNELS,
    PANEL_CHANNELS,
    STEP_TILE_ROWS,
    channel_order,
    column_share,
    output_channel,
)

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from trellis_kernels.cute import codebooks, prefill_loop, table_codebooks

PAIRS = [
    pytest.param(name, rate, id=f"{name}-{rate}")
    for name in (*codebooks.DEVICE_CODEBOOKS, *table_codebooks.TABLE_CODEBOOKS)
    for rate in CODEBOOKS[name].legal_rates
]
LANE = np.arange(32)
G, T = LANE >> 2, LANE & 3
BASE = 1 << 12


class Stage:
    """The codes of one block in one step, laid out as the bulk copies leave them."""

    def __init__(self, codes: np.ndarray, rate: Rate) -> None:
        share = column_share(rate)
        self.bytes = np.full(share.step_bytes, 0xA5, np.uint8)
        for row in range(STEP_TILE_ROWS):
            first = row * share.row_pitch
            self.bytes[first : first + share.row_bytes] = codes[row].reshape(-1).view(np.uint8)

    def load_shared(self, address, words):
        assert np.all(address % (4 * words) == 0)
        index = (address - BASE)[:, None] + np.arange(4 * words)
        return list(np.ascontiguousarray(self.bytes[index]).view("<u4").T)


@pytest.mark.parametrize(("codebook", "rate"), PAIRS)
def test_fragments_are_the_weights_in_the_order_of_the_rows(codebook, rate, numpy_warp, monkeypatch) -> None:
    rng = np.random.default_rng(rate.half_bits)
    codes = rng.integers(-(2**15), 2**15, (STEP_TILE_ROWS, BLOCK_CHANNELS // 16, rate.tile_words16), dtype=np.int16)
    weights = decode_inner(codes, get_codebook(codebook), rate).astype(np.float16)
    share, order = column_share(rate), channel_order()
    found = np.full((PANEL_CHANNELS, BLOCK_CHANNELS), np.nan, np.float16)
    written = np.zeros(found.shape, int)
    monkeypatch.setattr(numpy_warp, "load_shared", Stage(codes, rate).load_shared, raising=False)
    for module in (codebooks, table_codebooks, prefill_loop):
        monkeypatch.setattr(module, "primitives", numpy_warp)
    numpy_warp.shared = table_words(codebook, "compact").view(np.uint8)
    monkeypatch.setattr(prefill_loop, "Uint32", np.uint32)
    for warp, column in np.ndindex(4, 2):
        offset, before = prefill_loop.lane_column(share, column, warp, LANE)
        words = prefill_loop.load_words(BASE + offset, before, share, column)
        assert len(words) == share.read_words
        for index in range(4):
            fragment = prefill_loop.decode_fragment(words, share, index, codebook, SHARED_BASE)
            for register, values in enumerate(fragment):
                half, z = register & 1, register >> 1  # of an m64k16 A operand: row g + 8 half, channels + 8 z
                channel = np.array([output_channel(warp, g, column, half) for g in G])
                pair = np.ascontiguousarray(values).view(np.float16).reshape(32, 2)
                for j in range(2):
                    source = order[16 * index + 8 * z + 2 * T + j]
                    found[source, channel] = pair[:, j]
                    written[source, channel] += 1
    assert np.all(written == 1)
    np.testing.assert_array_equal(found.view(np.uint16), weights.view(np.uint16))
