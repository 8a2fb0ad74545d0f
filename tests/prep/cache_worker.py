"""Owns what one process of the shared-cache test does."""

from __future__ import annotations

import warnings
from pathlib import Path

from prep.samples import expected_tiles, extent_of, linears, open_layer
from trellis_prep import PreparedCache


def prepare_cached(model: Path, folder: Path, number: int) -> None:
    """Prepare every share through one folder again and again, each process in another order; no entry may be bad."""
    warnings.simplefilter("error")
    for turn in range(4):
        checkpoint, source, weights = open_layer(model)
        with checkpoint:
            for step in range(3):
                extent = extent_of(384, (number + turn + step) % 3, 1)
                prepared = PreparedCache(folder).prepare(source, weights, extent=extent)
                for expert, projection in linears(source):
                    expected = expected_tiles((source, weights), extent, expert, projection)
                    assert (prepared.tiles(expert, projection)[0].numpy() == expected).all()
