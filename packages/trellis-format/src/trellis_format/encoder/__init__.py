"""Owns the CPU encoder for test data and small tools.  It must not know files or layers of experts."""

from __future__ import annotations

from trellis_format.encoder.quantise import Quantised, quantise
from trellis_format.encoder.viterbi import encode_tiles

__all__ = ["Quantised", "encode_tiles", "quantise"]
