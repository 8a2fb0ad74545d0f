"""Owns EXL3, the format of ExLlamaV3: its linears, its experts' names, and the adapter to `TrellisSource`.

It must not know ranks or devices.
"""

from __future__ import annotations

from trellis_format.exl3.adapter import trellis_from_exl3
from trellis_format.exl3.layers import Exl3Layer, find_layers
from trellis_format.exl3.linear import Exl3Linear, describe_linear

__all__ = ["Exl3Layer", "Exl3Linear", "describe_linear", "find_layers", "trellis_from_exl3"]
