"""Owns the rank of a state, which the two table codebooks share.  It must not know their tables.

A state w of K new bits (the branch) and h = 16 - K older ones (the history) is mapped to a rank in [0, 65536), one to
one at each K, so that the 2^K branches of a history get ranks that lie apart by 2^h and a phase that looks random.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trellis_format.rates import STATE_BITS, Rate

__all__ = ["ADDEND", "FOLD", "MULTIPLIER", "rank_of", "ranks_of"]

FOLD = 11
"""Bits by which the history is folded onto itself."""
MULTIPLIER = 0x3FA7D929
"""Factor of the hash of the folded history, modulo 2^32."""
ADDEND = 0xC928FD8E
"""Term of that hash."""
_WORD = 0xFFFFFFFF


def rank_of(state: int, rate: Rate) -> int:
    """The rank of one state at an integer K: int in [0, 65536) to int in [0, 65536)."""
    bits = rate.half_bits // 2
    kept = STATE_BITS - bits
    mask = (1 << kept) - 1
    history, branch = state >> bits, state & ((1 << bits) - 1)
    mixed = history ^ history >> FOLD
    mixed ^= mixed << FOLD & mask
    hashed = mixed * MULTIPLIER + ADDEND & _WORD
    return (_reversed(branch, bits) ^ hashed >> 32 - bits) << kept | hashed & mask


def ranks_of(states: npt.NDArray[np.uint16], rate: Rate) -> npt.NDArray[np.uint16]:
    """The ranks of many states at an integer K: `[...] uint16` to `[...] uint16`."""
    bits = rate.half_bits // 2
    kept = STATE_BITS - bits
    mask = np.uint32((1 << kept) - 1)
    words = states.astype(np.uint32)
    history = words >> np.uint32(bits)
    mixed = history ^ history >> np.uint32(FOLD)
    mixed ^= mixed << np.uint32(FOLD) & mask
    hashed = mixed * np.uint32(MULTIPLIER) + np.uint32(ADDEND)
    reverse = np.array([_reversed(branch, bits) for branch in range(1 << bits)], dtype=np.uint32)
    branch = reverse[words & np.uint32((1 << bits) - 1)]
    ranks: npt.NDArray[np.uint32] = (branch ^ hashed >> np.uint32(32 - bits)) << np.uint32(kept) | hashed & mask
    return ranks.astype(np.uint16)


def _reversed(branch: int, bits: int) -> int:
    return sum((branch >> place & 1) << bits - 1 - place for place in range(bits))
