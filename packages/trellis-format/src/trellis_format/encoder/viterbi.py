"""Owns the search for the ring of states whose values come closest to a tile.  It must not know scales or rotations.

Between positions t - 1 and t lies a node: the 16 - D(t) bits that both states share, where D(t) are the bits by which
the ring advances at t.  A state at t is its node and D(t) further bits, and its last 16 - D(t + 1) bits are the next
node, so the cheapest path is found node by node (Viterbi).  The ring closes on itself, which takes two passes: one over
a window around the seam with free ends, whose path fixes the node on the seam, and one around the ring from that node
back to it.  The result is near the optimum, not always at it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trellis_format.codebooks import STATES, Codebook
from trellis_format.errors import FormatTypeError, FormatValueError
from trellis_format.rates import STATE_BITS, TILE_WEIGHTS, Rate

__all__ = ["SEAM_WINDOW", "encode_tiles"]

SEAM_WINDOW = 64
"""Positions on each side of the seam that the first pass sees: four times the memory of the slowest ring."""
_BATCH = 2  # tiles of one step; the 65,536 costs of each then stay in a second-level cache
_NARROW_INNER = 32  # a broadcast over fewer values than this is slow, so those rates take the other axis order

_Single = npt.NDArray[np.float32]


def encode_tiles(values: npt.NDArray[np.floating], codebook: Codebook, rate: Rate) -> npt.NDArray[np.uint16]:
    """Find, for each tile, a closed ring of states whose values have a small squared distance from it.

    Takes about 20 ms for a tile, whatever the rate.

    Args:
        values: `[tiles, 256]` floating, in position order (see `trellis_format.tiles.split_tiles`), in the scale of the
            codebook.
        codebook: the law from state to value.
        rate: K.

    Returns:
        `[tiles, 256] uint16` states, for `trellis_format.ring.pack_states`.

    Raises:
        FormatTypeError: if the values are not floating.
        FormatValueError: if they are not `[tiles, 256]`, not finite, or K is not legal for the codebook.
    """
    if not np.issubdtype(values.dtype, np.floating):
        raise FormatTypeError(f"values of tiles must be floating, got {values.dtype}")
    if values.ndim != 2 or values.shape[1] != TILE_WEIGHTS:
        raise FormatValueError(f"values must be [tiles, {TILE_WEIGHTS}], got shape {values.shape}")
    if not np.isfinite(values).all():
        tile, position = np.argwhere(~np.isfinite(values))[0]
        raise FormatValueError(f"values must be finite; tile {tile} has {values[tile, position]} at {position}")
    codebook.check_rate(rate)
    trellis = _Trellis(codebook, rate)
    states = np.empty(values.shape, dtype=np.uint16)
    for first in range(0, len(values), _BATCH):
        batch = slice(first, first + _BATCH)
        states[batch] = trellis.encode(values[batch].astype(np.float32))
    return states


class _Trellis:
    """The search for one codebook and rate.

    `_values` holds the value of every state for each number of bits D of a position, as an array over (node, bits) or,
    where D is small, over (bits, node), so that the innermost axis stays long.
    """

    def __init__(self, codebook: Codebook, rate: Rate) -> None:
        self._steps = [int(step) for step in rate.advances()]
        self._table = codebook.table_for(rate).astype(np.float32)
        self._narrow = {bits: 1 << bits < _NARROW_INNER for bits in set(self._steps)}
        self._values = {
            bits: np.ascontiguousarray(self._table.reshape(-1, 1 << bits).T if narrow else self._table).reshape(-1)
            for bits, narrow in self._narrow.items()
        }

    def encode(self, target: _Single) -> npt.NDArray[np.uint16]:
        """`[tiles, 256] float32` to `[tiles, 256] uint16`."""
        tiles = len(target)
        seam = [position % TILE_WEIGHTS for position in range(-SEAM_WINDOW, SEAM_WINDOW)]
        free = np.zeros((tiles, STATES >> self._steps[seam[0]]), dtype=np.float32)
        costs, last = self._forward(target, seam, free)
        around = self._back(target, seam, costs, np.argmin(last, axis=1))
        node = around[:, SEAM_WINDOW].astype(np.int64) >> self._steps[0]
        forced = np.full((tiles, STATES >> self._steps[0]), np.inf, dtype=np.float32)
        forced[np.arange(tiles), node] = 0.0
        ring = list(range(TILE_WEIGHTS))
        costs, _ = self._forward(target, ring, forced)
        return self._back(target, ring, costs, node)

    def _forward(self, target: _Single, positions: list[int], entry: _Single) -> tuple[list[_Single], _Single]:
        """Cost of the cheapest path to each node: before each position `[tiles, nodes]`, and after the last."""
        before: list[_Single] = []
        work = np.empty((len(target), STATES), dtype=np.float32)
        for position in positions:
            before.append(entry)
            bits, following = self._steps[position], self._steps[(position + 1) % TILE_WEIGHTS]
            np.subtract(self._values[bits], target[:, position, None], out=work)
            np.multiply(work, work, out=work)
            if self._narrow[bits]:
                by_node = work.reshape(len(target), 1 << bits, -1)
                by_node += entry[:, None, :]
                for _ in range(following):  # by halves, since a reduction over so short an axis is slow
                    halves = by_node.reshape(len(target), 1 << bits, 2, -1)
                    by_node = np.minimum(halves[:, :, 0], halves[:, :, 1])
                entry = by_node.transpose(0, 2, 1).reshape(len(target), -1)
            else:
                by_bits = work.reshape(len(target), -1, 1 << bits)
                by_bits += entry[:, :, None]
                entry = work.reshape(len(target), 1 << following, -1).min(axis=1)
        return before, entry

    def _back(
        self, target: _Single, positions: list[int], before: list[_Single], node: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.uint16]:
        """States `[tiles, positions]` of the cheapest path into `node`, read off the costs without back pointers."""
        tiles = np.arange(len(target))[:, None]
        states = np.empty((len(target), len(positions)), dtype=np.uint16)
        for index in range(len(positions) - 1, -1, -1):
            position = positions[index]
            bits, following = self._steps[position], self._steps[(position + 1) % TILE_WEIGHTS]
            kept = STATE_BITS - following
            candidates = (np.arange(1 << following) << kept) | node[:, None]
            cost = np.square(self._table[candidates] - target[:, position, None])
            cost += before[index][tiles, candidates >> bits]
            chosen = candidates[tiles[:, 0], np.argmin(cost, axis=1)]
            states[:, index] = chosen
            node = chosen >> bits
        return states
