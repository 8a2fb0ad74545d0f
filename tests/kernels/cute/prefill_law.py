"""Owns the laws of the many-token path that several tests share: the image of packed rows, and threads in numpy.

It must not know kernels beyond the helpers that it stands in for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trellis_kernels.cute.prefill_share import PANEL_CHANNELS, PIECES, ROW_GROUP, channel_order, piece_place

PIECE_VALUES = PANEL_CHANNELS // PIECES


def image_of(rows: npt.NDArray[np.float16]) -> npt.NDArray[np.float16]:
    """`[slots, channels]` to their image `[channels / 64, slots, 64]`, piece by piece."""
    slots, channels = rows.shape
    image = np.full((channels // PANEL_CHANNELS, slots, PANEL_CHANNELS), np.nan, np.float16)
    order = channel_order()
    for panel in range(channels // PANEL_CHANNELS):
        for slot in range(slots):
            for piece in range(PIECES):
                target = PIECE_VALUES * piece_place(piece, slot)
                source = panel * PANEL_CHANNELS + order[PIECE_VALUES * piece : PIECE_VALUES * (piece + 1)]
                image[panel, slot, target : target + PIECE_VALUES] = rows[slot, source]
    return image


class NumpyThreads:
    """Threads over one shared memory of fp32 words and one output of bytes; stands in for `gemm_primitives`.

    Every access is checked for bounds, and shared accesses for bank conflicts up to the number of ways allowed.
    """

    def __init__(self, threads: int, shared_bytes: int = 0, out_bytes: int = 0, ways: int = 1) -> None:
        self.shared = np.full(shared_bytes // 4, np.nan, np.float32)
        self.out = np.full(out_bytes, 0xA5, np.uint8)
        self.thread = np.arange(threads)
        self.warp, self.lane = self.thread // 32, self.thread % 32
        self.ways = ways

    def load_shared_floats(self, address: Any, count: int) -> list[npt.NDArray[np.float32]]:
        words = self._words(address, count)
        return [self.shared[words + index] for index in range(count)]

    def store_shared_floats(self, address: Any, values: list[Any]) -> None:
        words = self._words(address, len(values))
        assert np.unique(words).size == words.size
        for index, value in enumerate(values):
            self.shared[words + index] = value

    def load_shared(self, address: Any, count: int) -> list[npt.NDArray[np.uint32]]:
        return [word.view(np.uint32) for word in self.load_shared_floats(address, count)]

    def load_shared_int(self, address: Any) -> npt.NDArray[np.int32]:
        return self.load_shared_floats(address, 1)[0].view(np.int32)

    def store_shared_words(self, address: Any, values: list[Any]) -> None:
        self.store_shared_floats(address, [np.ascontiguousarray(value).view(np.float32) for value in values])

    def _words(self, address: Any, count: int) -> npt.NDArray[np.int64]:
        address = np.broadcast_to(np.asarray(address), self.thread.shape)
        assert np.all(address % (4 * count) == 0)
        words = address // 4
        at_once = 32 // count
        for first in range(0, self.thread.size, at_once):
            touched = np.unique(words[first : first + at_once][:, None] + np.arange(count))
            assert np.bincount(touched % 32).max() <= self.ways, f"bank conflict at {touched}"
        return words

    def pack_halves(self, low: Any, high: Any) -> npt.NDArray[np.uint32]:
        pair = np.stack(np.broadcast_arrays(low, high), axis=-1).astype(np.float16)
        return np.ascontiguousarray(pair).view(np.uint32)[..., 0]

    def store_words(self, address: Any, words: list[Any], predicate: Any = True) -> None:
        data = np.stack([np.asarray(word, np.uint32) for word in words], axis=-1).view(np.uint8)
        address = np.broadcast_to(np.asarray(address), data.shape[:1])
        live = np.broadcast_to(np.asarray(predicate), address.shape)
        index = address[live][:, None] + np.arange(data.shape[1])
        assert index.size == np.unique(index).size
        assert index.size == 0 or (index.min() >= 0 and index.max() < self.out.size)
        assert np.all(address % data.shape[1] == 0)
        self.out[index] = data[live]

    def store_floats(self, address: Any, values: list[Any], predicate: Any = True) -> None:
        words = [np.ascontiguousarray(value, np.float32).view(np.uint32) for value in values]
        self.store_words(address, words, predicate)

    def load_words(self, address: Any, count: int, *, read_only: bool = True) -> list[npt.NDArray[np.uint32]]:
        raise AssertionError("nothing here reads global memory")

    def floats_from(self, word: Any, dtype: str) -> list[npt.NDArray[np.float32]]:
        return [self.float_from(word, dtype, half) for half in range(2)]

    def float_from(self, word: Any, dtype: str, half: int) -> npt.NDArray[np.float32]:
        word = np.asarray(word, np.uint32)
        if dtype == "float32":
            return word.view(np.float32)
        if dtype == "bfloat16":
            return ((word << np.uint32(16)) if half == 0 else word & np.uint32(0xFFFF0000)).view(np.float32)
        return np.ascontiguousarray(word).view(np.float16).reshape(*word.shape, 2)[..., half].astype(np.float32)

    def choose(self, selector: Any, value: Any) -> npt.NDArray[np.float32]:
        return np.where(np.asarray(selector) >= 0, value, np.float32(0.0))

    def lane_swap(self, value: Any, mask: int) -> npt.NDArray[np.float32]:
        return np.asarray(value)[self.thread ^ mask]

    def fma(self, a: Any, b: Any, c: Any) -> npt.NDArray[np.float32]:
        return (np.asarray(a, np.float64) * b + c).astype(np.float32)


def rows_in_order(image_bytes: npt.NDArray[np.uint8], panels: int, slots: int) -> npt.NDArray[np.float16]:
    """Bytes of an image as `[panels, slots, 64]`."""
    return image_bytes.view(np.float16).reshape(panels, slots, ROW_GROUP * PIECE_VALUES)
