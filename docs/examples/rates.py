"""What each codebook and rate costs and keeps, on one matrix of normal numbers: the table of the guide on choosing K.

python docs/examples/rates.py        takes about three minutes on one CPU core; the same numbers each time
"""

from __future__ import annotations

import numpy as np

from trellis_format.codebooks import CODEBOOKS
from trellis_format.encoder import quantise
from trellis_format.rates import ALL_RATES, Rate
from trellis_format.reference import reconstruct

SIDE = 128
"""Channels on either side of the matrix: one block."""


def error(codebook: str, rate: Rate) -> float:
    """The relative L2 error of a quantised matrix of independent normal numbers, without calibration."""
    matrix = np.random.default_rng(0).standard_normal((SIDE, SIDE))
    made = quantise(matrix, rate, codebook)
    restored = reconstruct(made.trellis, made.suh, made.svh, codebook, rate)
    return float(np.linalg.norm(restored - matrix) / np.linalg.norm(matrix))


def row(rate: Rate) -> str:
    """One row of the table: K, bytes of a tile, ideal error, and the error of each codebook that has this K."""
    ideal = 2.0**-rate.bits  # the least of any code for normal numbers, by rate-distortion theory
    laws = CODEBOOKS.values()
    errors = (f"{error(law.name, rate):.2%}" if rate in law.legal_rates else "-" for law in laws)
    return "| " + " | ".join([str(rate), str(rate.tile_bytes), f"{ideal:.2%}", *errors]) + " |"


if __name__ == "__main__":
    print("| K | bytes of a tile | least possible | " + " | ".join(CODEBOOKS) + " |")
    print("|" + "---|" * (3 + len(CODEBOOKS)))
    for each in ALL_RATES:
        print(row(each), flush=True)
