"""Owns the bit ring of a tile: how 16-bit states are cut from stored words and put back.  It must not know codebooks.

A tile of 256 weights is a closed ring of 256 K bits.  Stored words are read as little-endian uint32, most significant
bit first; on 16-bit words that is a swap within each pair.  The state of position t is the 16 ring bits that end at
`Rate.ends()[t]`, so the first states reach back into the end of the tile.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trellis_format.errors import FormatTypeError, FormatValueError
from trellis_format.rates import STATE_BITS, TILE_WEIGHTS, Rate

__all__ = ["chain_holds", "pack_states", "unpack_states"]


def unpack_states(trellis: npt.NDArray[np.int16], rate: Rate) -> npt.NDArray[np.uint16]:
    """Cut the states of every position out of stored tiles.

    Args:
        trellis: `[..., 16*K] int16` (or uint16), the last axis one tile.
        rate: K.

    Returns:
        `[..., 256] uint16`, states in position order.

    Raises:
        FormatTypeError: if the words are not 16-bit integers.
        FormatValueError: if the last axis is not 16*K words.
    """
    stream = _swap_pairs(_words16(trellis, rate)).astype(np.uint32)
    start = (rate.ends() - STATE_BITS) % rate.ring_bits
    word, offset = start // STATE_BITS, (start % STATE_BITS).astype(np.uint32)
    pair = stream[..., word] << np.uint32(STATE_BITS)
    pair |= stream[..., (word + 1) % rate.tile_words16]
    return (pair >> (np.uint32(STATE_BITS) - offset)).astype(np.uint16)


def pack_states(states: npt.NDArray[np.uint16], rate: Rate) -> npt.NDArray[np.int16]:
    """Write the low bits of every state back into stored words; the inverse of `unpack_states`.

    Args:
        states: `[..., 256] uint16` in position order.  Only the bits by which the ring advances are written, so
            states round-trip exactly if and only if `chain_holds`.
        rate: K.

    Returns:
        `[..., 16*K] int16`.

    Raises:
        FormatTypeError: if the states are not 16-bit integers.
        FormatValueError: if the last axis is not 256 states.
    """
    words = _integers16(states, "states")
    if states.shape[-1:] != (TILE_WEIGHTS,):
        raise FormatValueError(f"a tile has {TILE_WEIGHTS} states, got shape {states.shape}")
    advances = rate.advances()
    position = np.repeat(np.arange(TILE_WEIGHTS), advances)
    bit_in_symbol = np.arange(rate.ring_bits) - np.repeat(np.cumsum(advances) - advances, advances)
    shift = (advances[position] - 1 - bit_in_symbol).astype(np.uint16)
    bits = (words[..., position] >> shift) & np.uint16(1)
    octets = np.ascontiguousarray(np.packbits(bits.astype(np.uint8), axis=-1))
    stream = octets.view(">u2").astype(np.uint16)
    return _swap_pairs(stream).view(np.int16)


def chain_holds(states: npt.NDArray[np.uint16], rate: Rate) -> bool:
    """Whether each state's high bits are the low bits of the state before it, around the ring.

    Args:
        states: `[..., 256] uint16` in position order.
        rate: K.

    Raises:
        FormatTypeError: if the states are not 16-bit integers.
    """
    advances = rate.advances().astype(np.uint32)
    current = _integers16(states, "states").astype(np.uint32)
    before = np.roll(current, 1, axis=-1)
    kept = (np.uint32(1) << (np.uint32(STATE_BITS) - advances)) - np.uint32(1)
    return bool(np.all(current >> advances == before & kept))


def _words16(trellis: npt.NDArray[np.int16], rate: Rate) -> npt.NDArray[np.uint16]:
    words = _integers16(trellis, "trellis words")
    if trellis.shape[-1:] != (rate.tile_words16,):
        raise FormatValueError(f"a tile of K = {rate} has {rate.tile_words16} words, got shape {trellis.shape}")
    return words


def _integers16(array: npt.NDArray[Any], what: str) -> npt.NDArray[np.uint16]:
    if array.dtype not in (np.int16, np.uint16):
        raise FormatTypeError(f"{what} must be int16, got {array.dtype}")
    return np.ascontiguousarray(array).view(np.uint16)


def _swap_pairs(words: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
    pairs = words.reshape(*words.shape[:-1], words.shape[-1] // 2, 2)
    return np.ascontiguousarray(pairs[..., ::-1]).reshape(words.shape)
